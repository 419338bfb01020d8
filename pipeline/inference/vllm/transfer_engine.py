"""The base class of the weight-transfer engines, inside each process of a vLLM server.

Owns the server's side of an update, for all transports: it joins a group with each sending rank of the trainer,
receives in a thread while the engine generates, and changes the model in one call. The model changes to the announced
version or not at all. No wait is longer than the trainer's deadline. Must not know HTTP, nor the transport of bytes.

No call raises for a failed update: it sets `failure`, which the trainer requests. When a call fails in one process of
a tensor-parallel server, vLLM does not read the answers of the others (`MultiprocExecutor.collective_rpc`), so each
later call would return answers of the call before it.

    init_transfer_engine   publishes the slices that this process needs, and joins the groups with the trainer's ranks
    start_weight_update    starts to receive; returns at once
    update_weights         waits for all bytes, then changes the model or the adapter
    finish_weight_update   ends an update, including an incomplete one
"""

import logging
import os
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from pipeline.errors import WeightSyncError, one_line, reason_of
from pipeline.inference.vllm.adapter_loading import AdapterSlot
from pipeline.inference.vllm.direct_loading import DirectTensors
from pipeline.inference.vllm.expert_packing import pack_experts_at_updates
from pipeline.inference.vllm.server_password import server_password
from pipeline.inference.weight_sync.rank_rows import RowSource, receiving_order
from pipeline.inference.weight_sync.server_shards import Shard
from pipeline.inference.weight_sync.transfer_route import RowReceiver, group_name, process_name
from pipeline.inference.weight_sync.transports.gloo import (
    PreparedSignal,
    TransferGroup,
    WeightLayout,
    connect_store,
    publish_key,
)
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, Receiver
from pipeline.inference.weight_sync.weight_relay import WeightRelay
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
G = TypeVar("G", TransferGroup, GpuGroup)


@dataclass
class EngineInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The trainer's address, and the layout of its updates.

    Attributes:
        host, port: the trainer's store.
        group: prefix of the groups' names, used once (`transfer_route.group_name`).
        processes: number of this server's processes.
        address: this server's address, on which the groups listen.
        seconds: deadline of each update.
        meeting_seconds: deadline of the meeting with the sources.
        layout: `WeightLayout.plain()` of every update.
        sources: `RowSource.plain()` of each sending rank of the trainer.
        adapter: the settings of an adapter; empty for a whole model's weights.
        at_once: whether a single rank sends a whole layout in one chunk (`Shard.chunks`).
        on_host: whether a GPU's whole model is staged in host memory.
        relays: whether this server may have to forward the weights to others (CPUs only).
        relayed: whether another server forwards the weights to this one; `sources` then has one with all rows.
    """

    host: str
    port: int
    group: str
    processes: int
    address: str
    seconds: float
    meeting_seconds: float
    layout: list[list[Any]]
    sources: list[dict[str, Any]]
    adapter: dict[str, Any]
    at_once: bool
    on_host: bool
    relays: bool = False
    relayed: bool = False


@dataclass
class EngineUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The announcement of an update: its policy version."""

    version: int


class TransferEngine(WeightTransferEngine[EngineInit, EngineUpdate], Generic[G]):  # type: ignore[misc]
    """Receives weights into a staging buffer, then copies them into the model, or installs the adapter.

    Attributes:
        version: the policy version of the model; None before the first update, after a failed one, and without
            groups.
        failure: the reason why the trainer was not met, or why the last update failed; empty without a failure.
    """

    init_info_cls = EngineInit
    update_info_cls = EngineUpdate
    supports_draft_weight_update = False

    version: int | None = None
    failure: str = ""
    _groups: Sequence[G] = ()
    _rows: RowReceiver | None = None
    _arriving: "Future[tuple[int, Any]] | None" = None
    _adapter: AdapterSlot | None = None
    _relay: WeightRelay | None = None

    @abstractmethod
    def _stage(self, layout: WeightLayout, on_host: bool) -> tuple[Shard, Tensor]:
        """Allocate the staging buffer for this layout; returns the slices that this process needs, and the buffer.

        On a GPU, the buffer of a whole model is in pinned host memory with `on_host`.
        """

    @abstractmethod
    def _join(self, store: Store, name: str, source: RowSource, address: str, deadline: Deadline) -> G:
        """Join the group of this name with a rank of the trainer."""

    @abstractmethod
    def _receive(self, groups: Sequence[G], rows: RowReceiver, deadline: Deadline) -> int:
        """Fill the staging buffer. Returns the version. Called in the receiving thread."""

    @abstractmethod
    def _arrived(self) -> Iterable[tuple[str, Tensor]]:
        """The received tensors of an adapter, in host memory."""

    @abstractmethod
    def _take(self) -> None:
        """Replace every weight of the model by the received one."""

    def init_transfer_engine(self, init_info: EngineInit) -> None:
        """Join the groups with the trainer's ranks. Another call drops the earlier groups first."""
        self.shutdown()
        self.failure = ""
        with self._failure_recorded():
            self._meet(init_info)

    def _meet(self, init_info: EngineInit) -> None:
        self._seconds = init_info.seconds
        deadline = Deadline("the trainer's group", init_info.meeting_seconds)
        layout = WeightLayout.parse(init_info.layout)
        sources = [RowSource.parse(layout, plain) for plain in init_info.sources]
        self._adapter = self._adapter_slot(layout, init_info.adapter)
        shard, buffer = self._stage(layout, init_info.on_host)
        process = self.vllm_config.parallel_config.rank
        order = receiving_order(init_info.group, process, len(sources), init_info.processes)
        device = self._arrival_device()
        on_host = buffer.device.type != device.type

        def connect() -> Store:
            return connect_store(init_info.host, init_info.port, server_password(), init_info.seconds)

        relays, arrived = init_info.relays, _ignore_progress
        if relays:
            self._relay = WeightRelay(layout, buffer, init_info.address, connect, init_info.seconds)
            arrived = self._relay.note
        self._rows = RowReceiver(
            shard,
            sources,
            buffer,
            init_info.at_once and not relays,
            order,
            device,
            on_host,
            arrived,
            sealed=init_info.relayed,
        )
        store = connect()
        name = process_name(init_info.group, process)
        receiver = Receiver(gpu=self._gpu(), slices=shard.plain(), on_host=on_host, relays=relays)
        publish_key(store, name, receiver.text())
        self._groups = [
            self._join(store, group_name(name, number), source, init_info.address, deadline)
            for number, source in enumerate(sources)
        ]

    def start_weight_update(self) -> None:
        self.failure = ""
        with self._failure_recorded():
            self._begin_to_receive()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with self._failure_recorded():
            self.receive_weights(self.parse_update_info(update_info))

    def _begin_to_receive(self) -> None:
        if not self._groups or self._rows is None:
            raise WeightSyncError("the server has not met the trainer: init_weight_transfer_engine comes first")
        if self._relay is not None:
            self._relay.begin()
        self._arriving = Future()
        deadline = Deadline("weights from the trainer", self._seconds)
        # Not a pool: its threads would keep an ending server alive until the deadline.
        arguments = self._groups, self._rows, self._relay, self._arriving, deadline
        Thread(target=self._receive_and_prepare, args=arguments, name="weights", daemon=True).start()

    def receive_weights(self, update_info: EngineUpdate) -> None:
        """Wait for the update that `start_weight_update` receives, and install it. On an error the old weights stay."""
        if self._arriving is None:
            raise WeightSyncError("no update was started")
        version, adapter = self._arriving.result(self._seconds + 1)
        if version != update_info.version:
            raise WeightSyncError(f"version {update_info.version} was announced, version {version} came")
        self._arriving = None
        if self._adapter is not None:
            self._adapter.install(adapter)
        else:
            with exit_process_on_failure("the weights could not be loaded"):
                self._take()
        self.version = version

    def finish_weight_update(self) -> None:
        if self._arriving is not None:
            self.shutdown()

    def leave(self) -> bool:
        """Drop the groups after the trainer's leave signal (`gloo.LeaveSignal`), which rank 0 sends for all ranks.
        Returns whether the signal came."""
        announced = not self._groups or self._groups[0].wait_for_leaving()
        self.shutdown()
        return announced

    def adopt_server(self, group: str) -> bool:
        """Join a group with the same process of another server, which gets the weights from here; False if this server
        does not relay. The trainer chose `group`."""
        if self._relay is None:
            return False
        self._relay.adopt(process_name(group, self.vllm_config.parallel_config.rank))
        return True

    def feed_server(self, group: str, version: int, seconds: float) -> bool:
        """Forward a version to a server that was adopted under `group`; False if there is none."""
        if self._relay is None:
            return False
        return self._relay.feed(process_name(group, self.vllm_config.parallel_config.rank), version, seconds)

    def shutdown(self) -> None:
        """Drop the groups; the trainer's ranks notice at their next operation, and the servers fed from here too."""
        self._drop(self._groups)
        _close_relay(self._relay)
        self._arriving = self.version = self._relay = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Unsupported. Older releases of vLLM require the method."""
        raise NotImplementedError("the trainer sends by pipeline.inference.weight_sync.weight_sender")

    @contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        """Set `failure` from an error in the block, and drop the groups."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - recorded, and requested by the trainer
            self.failure = self.failure or reason_of(error)
            log.warning("no weights from the trainer: %s", self.failure)
            self.shutdown()

    def _arrival_device(self) -> torch.device:
        """The device on which bytes arrive."""
        return torch.device("cpu")

    def _gpu(self) -> str:
        """The GPU of this process, in the format of `gpu_of`; empty without one."""
        return ""

    def _adapter_slot(self, layout: WeightLayout, settings: dict[str, Any]) -> AdapterSlot | None:
        """The slot for an adapter with these settings and tensors; None without settings, for a whole model."""
        names = [parameter.name for parameter in layout.parameters]
        return AdapterSlot(self.model, self.model_config.model, settings, names) if settings else None

    def _receive_and_prepare(
        self,
        groups: Sequence[G],
        rows: RowReceiver,
        relay: WeightRelay | None,
        arriving: "Future[tuple[int, Any]]",
        deadline: Deadline,
    ) -> None:
        """The body of the receiving thread: receive, prepare, and notify the trainer."""

        def receive() -> int:
            return self._receive(groups, rows, deadline)

        try:
            arriving.set_result(receive_and_prepare(groups[0], receive, self._prepare))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: `receive_weights` raises it
            reason = reason_of(error)
            log.warning("the weights did not arrive: %s", reason)
            arriving.set_exception(WeightSyncError(reason))  # a new one: no traceback refers to the groups
            with suppress(WeightSyncError):  # its store may be lost too
                groups[0].report_lost(reason)
            self._drop(groups)
            _close_relay(relay)

    def _drop(self, groups: Sequence[G]) -> None:
        """End these groups. If one is broken, the other ranks of the trainer notice it now, not at their deadline."""
        if self._groups is groups:
            self._groups = ()

    def _prepare(self) -> Any:
        """The part of an installation that the receiving thread does: for an adapter, all but the last call."""
        return None if self._adapter is None else self._adapter.prepare(list(self._arrived()))


def _ignore_progress(version: int, end: int, accepted: bool) -> None:
    """For a server that forwards nothing."""


def _close_relay(relay: WeightRelay | None) -> None:
    if relay is not None:
        relay.close()


def receive_and_prepare(
    group: PreparedSignal, receive: Callable[[], int], prepare: Callable[[], Any]
) -> tuple[int, Any]:
    """Receive and prepare an update, then notify the trainer. Returns both results. `WeightSyncError` on a failure."""
    version, failure = receive(), ""
    try:
        prepared = prepare()
    except Exception as error:
        failure = f"what was received cannot be served: {one_line(error)}"
        raise WeightSyncError(failure) from error
    finally:
        group.report_prepared(version, failure)
    return version, prepared


@contextmanager
def exit_process_on_failure(what: str) -> Iterator[None]:
    """Kill this process on any error in the block, since an incompletely replaced model must not serve."""
    try:
        yield
    except BaseException:
        log.critical("%s; this server ends, its model is incomplete", what, exc_info=True)
        logging.shutdown()
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def reports_lost_weights(record: logging.LogRecord) -> bool:
    """False for vLLM's warning at each reload that a rotary embedding got no weights: no checkpoint has its table."""
    layer = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return not ("Failed to load weights" in record.getMessage() and str(layer).endswith("RotaryEmbedding"))


def reload_model(model: Any, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load checkpoint tensors into a vLLM model that is already serving."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    logging.getLogger(RELOAD_LOGGER).addFilter(reports_lost_weights)  # once, however often it is added
    pack_experts_at_updates()
    direct = DirectTensors(model_config.hf_config.model_type)
    initialize_layerwise_reload(model)
    model.load_weights(direct.without(weights))
    finalize_layerwise_reload(model, model_config)
    direct.load(model)
    pack_heads(model)


def pack_heads(model: nn.Module) -> None:
    """Pack output heads again: vLLM packs only loaded layers, and a tied head gets its weights from the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
