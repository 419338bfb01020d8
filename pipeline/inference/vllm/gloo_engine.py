"""The `gloo` weight-transfer engine that runs inside each process of a vLLM server: weights over TCP.

Owns the server's side of an update. Promises that generation goes on while the bytes arrive (a thread fills a staging
buffer), that the model changes at once or not at all, and that no wait is longer than the trainer's deadline. Only
`update_weights` of a whole model needs a paused server; an adapter changes between two steps. Must not know HTTP or
roles.

    start_weight_update    begins to receive; returns at once
    update_weights         waits for the last byte, then loads the model or installs the adapter
    finish_weight_update   ends an update, also one that was left half done
"""

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from pipeline.errors import WeightSyncError, one_line
from pipeline.inference.vllm.adapter_loading import AdapterSlot
from pipeline.inference.vllm.expert_packing import pack_experts_at_updates
from pipeline.inference.vllm.server_password import server_password
from pipeline.inference.weight_sync.transports.gloo import (
    SERVER,
    PreparedSignal,
    TransferGroup,
    WeightLayout,
    connect_store,
    publish_key,
)
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the trainer is and what it will send.

    Attributes:
        host, port: the trainer's store.
        group: name of the groups to meet in, used once: the process of rank r meets in `group/r`.
        address: this server's own address, for the group to listen on.
        seconds: deadline of each wait for the trainer.
        layout: `WeightLayout.plain()` of every update.
        adapter: what the tensors are: the settings of an adapter, or nothing for a whole model's weights.
        gpu: the GPU that the trainer sends from; none over gloo.
        at_once: whether it sends a whole layout in one chunk; over gloo it always does.
    """

    host: str
    port: int
    group: str
    address: str
    seconds: float
    layout: list[list[Any]]
    adapter: dict[str, Any]
    gpu: str
    at_once: bool


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version the trainer wants loaded."""

    version: int


class ReceiveTask:
    """One update on its way into the staging buffer, in a thread of its own."""

    def __init__(
        self, group: TransferGroup, staging: Tensor, seconds: float, prepare: Callable[[], Any] = lambda: None
    ) -> None:
        """Begin to receive; `prepare` is called in the thread once all bytes are there."""
        self._done: Future[tuple[int, Any]] = Future()
        self._deadline = Deadline("weights from the trainer", seconds)
        # Not a pool: its threads would keep an ending server alive until the deadline.
        Thread(target=self._run, args=(group, staging, prepare), name="weights", daemon=True).start()

    def _run(self, group: TransferGroup, staging: Tensor, prepare: Callable[[], Any]) -> None:
        try:
            self._done.set_result(receive_and_prepare(group, lambda: group.receive(staging, self._deadline), prepare))
        except WeightSyncError as error:
            self._done.set_exception(error)

    def result(self) -> tuple[int, Any]:
        """The version received, and what `prepare` made of it; waits for both, `WeightSyncError` or `TimeoutError` when
        they will not come."""
        return self._done.result(self._deadline.left + 1)


def receive_and_prepare(
    group: PreparedSignal, receive: Callable[[], int], prepare: Callable[[], Any]
) -> tuple[int, Any]:
    """The results of both; the trainer is notified after the second. `WeightSyncError` for whatever goes wrong."""
    version = receive()
    try:
        prepared = prepare()
    except Exception as error:
        raise WeightSyncError(f"what was received cannot be served: {one_line(error)}") from error
    finally:
        group.report_prepared(version)
    return version, prepared


class GlooEngine(WeightTransferEngine[GlooInit, GlooUpdate]):  # type: ignore[misc]
    """Receives every parameter into a staging buffer, then reloads the model, or installs an adapter, from it.

    Attributes:
        version: what the model holds; None before the first update, and once the group is dropped.
    """

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    supports_draft_weight_update = False

    version: int | None = None
    _group: TransferGroup | None = None
    _reception: ReceiveTask | None = None
    _adapter: AdapterSlot | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Meet the trainer. May be called again: the earlier group is dropped."""
        if self.parallel_config.world_size > 1 and not init_info.adapter:
            raise WeightSyncError("the gloo backend feeds servers of one process with whole models; use nccl")
        self.shutdown()
        self._seconds, self._layout = init_info.seconds, WeightLayout.parse(init_info.layout)
        self._adapter = adapter_slot(self, self._layout, init_info.adapter)
        self._staging = torch.empty(self._layout.bytes, dtype=torch.uint8)
        store = connect_store(init_info.host, init_info.port, server_password(), init_info.seconds)
        name = f"{init_info.group}/{self.vllm_config.parallel_config.rank}"
        publish_key(store, name)
        self._group = TransferGroup(store, name, SERVER, init_info.address, init_info.seconds)

    def start_weight_update(self) -> None:
        if self._group is None:
            raise WeightSyncError("the server has not met the trainer: init_weight_transfer_engine comes first")
        self._reception = ReceiveTask(self._group, self._staging, self._seconds, self._prepare)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Load what `start_weight_update` began to receive; on any error the old weights stay."""
        if self._reception is None:
            raise WeightSyncError("no update was started")
        try:
            version, adapter = self._reception.result()
            if version != update_info.version:
                raise WeightSyncError(f"version {update_info.version} was announced, version {version} came")
        except (WeightSyncError, TimeoutError):
            self.shutdown()
            raise
        self._reception = None
        self._load(adapter)
        self.version = version

    def finish_weight_update(self) -> None:
        if self._reception is not None:
            self.shutdown()

    def leave(self) -> bool:
        """Drop the group once the trainer has said that it leaves it; whether it has (`gloo.LeaveSignal`)."""
        heard = self._group is None or self._group.wait_for_leaving()
        self.shutdown()
        return heard

    def shutdown(self) -> None:
        """Drop the group; the trainer notices at once."""
        self._group = self._reception = self.version = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not this way (older releases of vLLM ask for the method)."""
        raise NotImplementedError("the trainer sends by pipeline.inference.weight_sync.weight_sender")

    def _prepare(self) -> Any:
        """What is done in the thread that receives: of an adapter, all but its installation."""
        return self._adapter.prepare(self._layout.views(self._staging)) if self._adapter else None

    def _load(self, adapter: Any) -> None:
        """Replace the adapter or every weight."""
        if self._adapter is not None:
            self._adapter.install(adapter)
            return
        with exit_process_on_failure("the weights could not be loaded"):
            reload_model(self.model, self.model_config, self._layout.views(self._staging))


def adapter_slot(engine: Any, layout: WeightLayout, settings: dict[str, Any]) -> AdapterSlot | None:
    """Where an engine's model has the adapter of these settings and tensors; None without settings: a whole model."""
    names = [parameter.name for parameter in layout.parameters]
    return AdapterSlot(engine.model, engine.model_config.model, settings, names) if settings else None


@contextmanager
def exit_process_on_failure(what: str) -> Iterator[None]:
    """A model that was left half replaced must not serve: any error within the block ends this process."""
    try:
        yield
    except BaseException:
        log.critical("%s; this server ends, its model is incomplete", what, exc_info=True)
        logging.shutdown()
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def reload_model(model: Any, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load checkpoint tensors into a vLLM model that already serves."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    pack_experts_at_updates()
    initialize_layerwise_reload(model)
    model.load_weights(weights)
    finalize_layerwise_reload(model, model_config)
    pack_heads(model)


def pack_heads(model: nn.Module) -> None:
    """Pack output heads again: a tied head gets its weights through the embedding, and vLLM packs what it loads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
