"""The `nccl` weight-transfer engine: weights on GPUs, without a pause.

A thread receives this process's shard into a staging buffer, on the GPU or in host memory, while the engine generates:
over nccl or, on a GPU that it shares with a rank of the trainer, out of that rank's memory, on a separate stream. One
call then enqueues copies from the buffer into the live parameters on the engine's stream, which puts them between two
steps; nothing is paused and nothing waits for the device. Promises that a step sees all of the old weights or all of
the new ones, that the copies are proven against vLLM's own reload before the first update (`verified_plans` remembers a
success), and that where they do not fit (quantised weights, say), every update is that reload, within one call. Of an
adapter, every process gets all; the thread prepares it, and the call has vLLM copy it to its place with the next step.
See `transfer_engine`.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.errors import reason_of
from pipeline.inference.vllm.copy_plan import CopyPlan, NoPlan, staging_buffer
from pipeline.inference.vllm.transfer_engine import TransferEngine, exit_process_on_failure, reload_model
from pipeline.inference.vllm.verified_plans import difference_from_reload
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.server_shards import Shard
from pipeline.inference.weight_sync.transfer_route import RowReceiver
from pipeline.inference.weight_sync.transports.gloo import SERVER, WeightLayout
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, gpu_of
from pipeline.inference.weight_sync.transports.gpu_transport import join_gpu_group
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagingBuffer:
    """Where weights of a layout arrive, and how they get into the model: by proven copies, or (None) by a reload; an
    adapter by neither."""

    layout: WeightLayout
    shard: Shard
    staging: Tensor
    copies: CopyPlan | None


class NcclEngine(TransferEngine[GpuGroup]):
    """Receives this process's shard, then copies it into the model, or installs the adapter, between two steps."""

    _intake: StagingBuffer | None = None
    _taken: torch.cuda.Event | None = None

    def _drop(self, groups: Sequence[GpuGroup]) -> None:
        super()._drop(groups)
        for group in groups:
            group.leave()

    def _arrival_device(self) -> torch.device:
        return torch.device(self.device)

    def _gpu(self) -> str:
        return gpu_of(self.device)

    def _stage(self, layout: WeightLayout, on_host: bool) -> tuple[Shard, Tensor]:
        """Proven copies and a staging buffer for this layout; both are kept as long as the layout is the same.

        A model may hold drawn values afterwards, until the next update.
        """
        if self._intake is None or self._intake.layout != layout:
            self._intake = self._taken = None
            self._intake = self._proven(layout, on_host) if self._adapter is None else self._whole(layout, False)
        return self._intake.shard, self._intake.staging

    def _join(self, store: Store, name: str, source: RowSource, address: str, deadline: Deadline) -> GpuGroup:
        return join_gpu_group(store, name, SERVER, self.device, source.gpu, deadline)

    def _receive(self, groups: Sequence[GpuGroup], rows: RowReceiver, deadline: Deadline) -> int:
        torch.cuda.set_device(self.device)
        after = self._taken
        try:
            return rows.receive(groups, lambda group, buffer: group.receive(buffer, deadline, after), deadline, after)
        except Exception as error:
            for group in groups:  # also ranks whose turn had not come
                group.refuse(reason_of(error))
            raise

    def _arrived(self) -> Iterable[tuple[str, Tensor]]:
        """An adapter's bytes go to the host, where vLLM keeps adapters."""
        intake = self._there()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            arrived = intake.staging.cpu()  # waits for this stream alone
        return intake.layout.views(arrived)

    def _take(self) -> None:
        intake = self._there()
        if intake.copies is not None:
            intake.copies.apply()
        else:
            self._reload(iter(intake.shard.staged.views(intake.staging)))
        self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._taken.record()

    def _there(self) -> StagingBuffer:
        assert self._intake is not None, "made when the trainer was met"
        return self._intake

    def _proven(self, layout: WeightLayout, on_host: bool) -> StagingBuffer:
        """Copies that do what a reload does; a reload out of all weights, where there are none."""
        if self.model_config.quantization is not None:
            return self._whole(layout, on_host)  # to round the weights is more than to copy them
        try:
            copies = CopyPlan.record(self.model.load_weights, layout)
            copies.stage(self.device, on_host)
            with exit_process_on_failure("the copies of the weights could not be proven"):
                reason = difference_from_reload(copies, self.model, self.vllm_config, self._reload)
            if not reason:
                return StagingBuffer(layout, copies.shard, copies.staging, copies)
            del copies
        except NoPlan as error:
            reason = str(error)
        log.warning("weights are reloaded at each update, which takes longer than copies: %s", reason)
        return self._whole(layout, on_host)

    def _whole(self, layout: WeightLayout, on_host: bool) -> StagingBuffer:
        """Room for all tensors."""
        staging = staging_buffer(layout.bytes, self.device, on_host)
        return StagingBuffer(layout, Shard.whole(layout), staging, None)

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        reload_model(self.model, self.model_config, tensors)
