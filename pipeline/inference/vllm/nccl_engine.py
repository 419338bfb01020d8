"""The `nccl` weight-transfer engine that runs inside a vLLM server on GPUs: weights without a pause.

Owns the server's side of an update. A thread receives this process's shard into a staging buffer while the engine
generates: over nccl or, on a GPU that it shares with the trainer, out of its memory, on a stream of its own. One call
then enqueues copies from the buffer into the live parameters on the engine's stream, which puts them between two steps;
nothing is paused and nothing waits for the device. Promises that a step sees all of the old weights or all of the new
ones, that the copies are proven against vLLM's own reload before the first update, and that where they do not fit
(quantised weights, say), every update is that reload, within one call. Of an adapter, every process gets all; the
thread prepares it, and the call has vLLM copy it to its place with the next step. Must not know HTTP.

    init_transfer_engine   finds out what this process needs, and says it
    start_weight_update    begins to receive; returns at once
    update_weights         once the bytes are here: the copies
    finish_weight_update   ends an update, also one that was left half done
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from pipeline.errors import WeightSyncError, one_line
from pipeline.inference.vllm.adapter_loading import AdapterSlot
from pipeline.inference.vllm.copy_plan import CopyPlan, NoPlan
from pipeline.inference.vllm.gloo_engine import (
    GlooInit,
    GlooUpdate,
    adapter_slot,
    exit_process_on_failure,
    receive_and_prepare,
    reload_model,
)
from pipeline.inference.vllm.server_password import server_password
from pipeline.inference.weight_sync.server_shards import Shard
from pipeline.inference.weight_sync.transports.gloo import SERVER, WeightLayout, connect_store, publish_key
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, Receiver, gpu_of, join_gpu_group
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)


class NcclInit(GlooInit):
    """Where the trainer is and what it will send over nccl; `gpu` is set, and `Shard.chunks` explains `at_once`."""


class NcclUpdate(GlooUpdate):
    """Which version the trainer wants served."""


@dataclass(frozen=True)
class StagingBuffer:
    """Where weights of a layout arrive, and how they get into the model: by proven copies, or (None) by a reload; an
    adapter by neither."""

    layout: WeightLayout
    shard: Shard
    staging: Tensor
    copies: CopyPlan | None


class NcclEngine(WeightTransferEngine[NcclInit, NcclUpdate]):  # type: ignore[misc]
    """Receives every parameter into a staging buffer, then copies it into the model, or installs the adapter, between
    two steps.

    Attributes:
        version: what the model holds; None before the first update and after one that failed.
    """

    init_info_cls = NcclInit
    update_info_cls = NcclUpdate
    supports_draft_weight_update = False

    version: int | None = None
    _group: GpuGroup | None = None
    _arriving: "Future[tuple[int, Any]] | None" = None
    _adapter: AdapterSlot | None = None
    _intake: StagingBuffer | None = None
    _taken: torch.cuda.Event | None = None

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        """Meet the trainer. May be called again: the earlier group is dropped, the proven copies stay if they can."""
        self.shutdown()
        deadline = Deadline("the trainer's group", init_info.seconds)
        layout = WeightLayout.parse(init_info.layout)
        self._adapter = adapter_slot(self, layout, init_info.adapter)
        intake = self._stage(layout)
        self._seconds, self._at_once = init_info.seconds, init_info.at_once
        name = f"{init_info.group}/{self.vllm_config.parallel_config.rank}"
        store = connect_store(init_info.host, init_info.port, server_password(), deadline.left)
        publish_key(store, name, Receiver(gpu=gpu_of(self.device), slices=intake.shard.plain()).text())
        self._group = join_gpu_group(store, name, SERVER, self.device, init_info.gpu, deadline)

    def start_weight_update(self) -> None:
        if self._group is None or self._intake is None:
            raise WeightSyncError("the server has not met the trainer: init_weight_transfer_engine comes first")
        self._arriving = Future()
        # Not a pool: its threads would keep an ending server alive until the deadline.
        Thread(
            target=self._receive, args=(self._group, self._intake, self._arriving), name="weights", daemon=True
        ).start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NcclUpdate) -> None:
        """Take what `start_weight_update` began to receive into the model; on any error the old weights stay."""
        if self._arriving is None or self._intake is None:
            raise WeightSyncError("no update was started")
        try:
            version, adapter = self._arriving.result(self._seconds + 1)
            if version != update_info.version:
                raise WeightSyncError(f"version {update_info.version} was announced, version {version} came")
        except (WeightSyncError, TimeoutError):
            self.shutdown()
            raise
        self._arriving = None
        if self._adapter is not None:
            self._adapter.install(adapter)
        else:
            self._take(self._intake)
        self.version = version

    def finish_weight_update(self) -> None:
        if self._arriving is not None:
            self.shutdown()

    def leave(self) -> bool:
        """Drop the group once the trainer has said that it leaves it; whether it has (`gloo.LeaveSignal`)."""
        heard = self._group is None or self._group.wait_for_leaving()
        self.shutdown()
        return heard

    def shutdown(self) -> None:
        """Drop the group; the trainer notices at its next operation."""
        group, self._group, self._arriving, self.version = self._group, None, None, None
        if group is not None:
            group.leave()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not this way (older releases of vLLM ask for the method)."""
        raise NotImplementedError("the trainer sends by pipeline.inference.weight_sync.weight_sender")

    def _stage(self, layout: WeightLayout) -> StagingBuffer:
        """Proven copies and a staging buffer for this layout; both are kept as long as the layout is the same.

        A model that is proven holds drawn values afterwards, until the next update.
        """
        if self._intake is None or self._intake.layout != layout:
            self._intake = self._taken = None
            self._intake = self._proven(layout) if self._adapter is None else self._whole(layout)
        return self._intake

    def _receive(self, group: GpuGroup, intake: StagingBuffer, arriving: "Future[tuple[int, Any]]") -> None:
        deadline = Deadline("weights", self._seconds)

        def receive() -> int:
            versions = {
                group.receive(intake.staging[chunk.start : chunk.end], deadline, self._taken)
                for chunk in intake.shard.chunks(self._at_once)
            }
            if len(versions) != 1:
                raise WeightSyncError(f"chunks of versions {sorted(versions)} came")
            return versions.pop()

        try:
            torch.cuda.set_device(self.device)
            arriving.set_result(receive_and_prepare(group, receive, lambda: self._prepare(intake)))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: who waits for the bytes is told
            told = error if isinstance(error, WeightSyncError) else WeightSyncError(one_line(error))
            log.warning("the weights did not arrive: %s", told)
            arriving.set_exception(told)

    def _prepare(self, intake: StagingBuffer) -> Any:
        """Of an adapter all but its installation: its bytes go to the host, where vLLM keeps adapters."""
        if self._adapter is None:
            return None
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            arrived = intake.staging.cpu()  # waits for this stream alone
        return self._adapter.prepare(intake.layout.views(arrived))

    def _take(self, intake: StagingBuffer) -> None:
        """Replace every weight."""
        with exit_process_on_failure("the weights could not be loaded"):
            if intake.copies is not None:
                intake.copies.apply()
            else:
                self._reload(iter(intake.shard.staged.views(intake.staging)))
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._taken.record()

    def _proven(self, layout: WeightLayout) -> StagingBuffer:
        """Copies that do what a reload does; a reload out of all weights, where there are none."""
        try:
            copies = CopyPlan.record(self.model.load_weights, layout)
            copies.stage(self.device)
            with exit_process_on_failure("the copies of the weights could not be proven"):
                reason = copies.verify_against_reload(self.model, self._reload)
            if not reason:
                return StagingBuffer(layout, copies.shard, copies.staging, copies)
            del copies
        except NoPlan as error:
            reason = str(error)
        log.warning("weights are reloaded at each update, which takes longer than copies: %s", reason)
        return self._whole(layout)

    def _whole(self, layout: WeightLayout) -> StagingBuffer:
        """Room for all tensors."""
        staging = torch.empty(layout.bytes, dtype=torch.uint8, device=self.device)
        return StagingBuffer(layout, Shard.whole(layout), staging, None)

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        reload_model(self.model, self.model_config, tensors)
