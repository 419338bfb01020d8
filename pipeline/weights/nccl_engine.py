"""The `nccl` weight-transfer engine that runs inside a vLLM server on GPUs: weights without a pause.

Owns the server's side of an update. A thread receives the bytes into a staging buffer while the engine generates: over
nccl or, on a GPU that it shares with the trainer, out of its memory, on a stream of its own. One call then enqueues
copies from the buffer into the live parameters on the engine's stream, which puts them between two steps; nothing is
paused and nothing waits for the device. Promises that a step sees all of the old weights or all of the new ones, that
the first update proves the copies against vLLM's own reload, and that where they do not fit (quantised weights, say),
every update is that reload, within one call. Must not know HTTP.

    start_weight_update    begins to receive; returns at once
    update_weights         once the bytes are here: the copies
    finish_weight_update   ends an update, also one that was left half done
"""

import logging
import os
import signal
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from vllm import envs
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from pipeline.errors import WeightSyncError, one_line
from pipeline.system.waiting import Deadline
from pipeline.weights.copies import CopyPlan, NoPlan
from pipeline.weights.engine import reload_model
from pipeline.weights.gpu_group import GpuGroup, gpu_of, join_gpu_group
from pipeline.weights.wire import SERVER, WeightLayout, announce, visit_store

log = logging.getLogger(__name__)


@dataclass
class NcclInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the trainer is, on which `gpu`, and what it will send; as `engine.GlooInit`, but never an adapter. Each
    process of the server has a group of its own, `group/<rank>`."""

    host: str
    port: int
    group: str
    address: str
    seconds: float
    layout: list[list[Any]]
    adapter: dict[str, Any]
    gpu: str


@dataclass
class NcclUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version the trainer wants served."""

    version: int


class NcclEngine(WeightTransferEngine[NcclInit, NcclUpdate]):  # type: ignore[misc]
    """Receives every parameter into a staging buffer, then copies it into the model between two steps.

    Attributes:
        version: what the model holds; None before the first update and after one that failed.
    """

    init_info_cls = NcclInit
    update_info_cls = NcclUpdate
    supports_draft_weight_update = False

    version: int | None = None
    _group: GpuGroup | None = None
    _arriving: "Future[int] | None" = None
    _plan: CopyPlan | None = None
    _tried_plan: bool = False
    _taken: torch.cuda.Event | None = None

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        """Meet the trainer. May be called again: the earlier group is dropped, the proven copies stay if they can."""
        self.shutdown()
        deadline = Deadline("the trainer's group", init_info.seconds)
        self._stage(WeightLayout.parse(init_info.layout))
        self._seconds = init_info.seconds
        name = f"{init_info.group}/{self.vllm_config.parallel_config.rank}"
        store = visit_store(init_info.host, init_info.port, str(envs.VLLM_API_KEY), deadline.left)
        announce(store, name, gpu_of(self.device))
        self._group = join_gpu_group(store, name, SERVER, self.device, init_info.gpu, deadline)

    def start_weight_update(self) -> None:
        if self._group is None:
            raise WeightSyncError("the server has not met the trainer: init_weight_transfer_engine comes first")
        self._arriving = Future()
        # Not a pool: its threads would keep an ending server alive until the deadline.
        Thread(target=self._receive, args=(self._group, self._arriving), name="weights", daemon=True).start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NcclUpdate) -> None:
        """Take what `start_weight_update` began to receive into the model; on any error the old weights stay."""
        if self._arriving is None:
            raise WeightSyncError("no update was started")
        try:
            version = self._arriving.result(self._seconds + 1)
            if version != update_info.version:
                raise WeightSyncError(f"version {update_info.version} was announced, version {version} came")
        except (WeightSyncError, TimeoutError):
            self.shutdown()
            raise
        self._arriving = None
        self._take()
        self.version = version

    def finish_weight_update(self) -> None:
        if self._arriving is not None:
            self.shutdown()

    def shutdown(self) -> None:
        """Drop the group; the trainer notices at its next operation."""
        group, self._group, self._arriving, self.version = self._group, None, None, None
        if group is not None:
            group.leave()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not this way (older releases of vLLM ask for the method)."""
        raise NotImplementedError("the trainer sends by pipeline.weights.sender")

    def _stage(self, layout: WeightLayout) -> None:
        """A staging buffer of this layout, and what was learned about it kept as long as the layout is the same."""
        if getattr(self, "_layout", None) == layout:
            return
        self._layout = layout
        self._staging = torch.empty(layout.bytes, dtype=torch.uint8, device=self.device)
        self._tensors = layout.views(self._staging)
        self._plan, self._tried_plan, self._taken = None, False, None

    def _receive(self, group: GpuGroup, arriving: "Future[int]") -> None:
        try:
            torch.cuda.set_device(self.device)
            arriving.set_result(group.receive(self._staging, Deadline("weights", self._seconds), self._taken))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: who waits for the bytes is told
            told = error if isinstance(error, WeightSyncError) else WeightSyncError(one_line(error))
            log.warning("the weights did not arrive: %s", told)
            arriving.set_exception(told)

    def _take(self) -> None:
        """Replace every weight. A model left half replaced must not serve: then this process ends."""
        try:
            if not self._tried_plan:
                self._plan = self._proven_plan()
            elif self._plan is not None:
                self._plan.apply()
            else:
                self._reload()
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._taken.record()
        except BaseException:
            log.critical("the weights could not be loaded; this server ends, its model is incomplete", exc_info=True)
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    def _proven_plan(self) -> CopyPlan | None:
        """The copies of this layout, if they do what a reload does; the model holds the weights either way."""
        self._tried_plan = True
        try:
            plan = CopyPlan.record(self.model.load_weights, self._tensors)
        except NoPlan as reason:
            log.warning("weights are reloaded at each update, which takes longer than copies: %s", reason)
            self._reload()
            return None
        difference = plan.differs(self.model, self._tensors, self._reload)
        if difference:
            log.warning("weights are reloaded at each update, which takes longer than copies: %s", difference)
            return None
        return plan

    def _reload(self) -> None:
        reload_model(self.model, self.model_config, self._tensors)
