"""Saving while training goes on.

Owns the copies that a save is written from, the thread that makes the memory for them early, and the one that writes
them, on one rank. Promises that tensors may change as soon as `stage` returned, that at most one save is under way, and
that whatever ends it badly is one `CheckpointError`. Must not know models, nor when to save.

On every rank, in the same order, with the one `AsyncSaver` of its `RankState`:

    saver.expect("policy", worker.state())                    # early: memory for the copies
    saver.stage("policy", worker.state())                     # only this holds training up
    saver.start(root, attempt, state, ["policy"], 2, group)   # returns at once; `group` is for saves alone
    …steps…
    if saver.idle: checkpoint = saver.result()                # every rank learns the same
"""

import copy
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.checkpoints.checkpoint_store import Checkpoint
from pipeline.checkpoints.pruning import prune
from pipeline.checkpoints.sharded_state import Tensors, save
from pipeline.checkpoints.trainer_state import TrainerState
from pipeline.errors import CheckpointError, one_line
from pipeline.utils.pinned_memory import current_device, pinned_like

log = logging.getLogger(__name__)
COMPLETION_SECONDS = 60.0
"""By how much the slowest rank may end a save later than the first."""
BUFFER_SECONDS = 300.0
"""For memory that is still being made when it is needed; less than an operation of a rank may take."""


class AsyncSaver:
    """One rank's part of the saves of a trainer, one at a time.

    Attributes:
        ended: when the last save did, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, dict[str, Tensor]] = {}
        """Of each model that was in the newest save, or is staged for the next, by the place in its tree."""
        self._staged: dict[str, Tensors] = {}
        self._save: Future[Checkpoint] | None = None
        self._making: list[threading.Thread] = []
        self.ended = 0.0

    @property
    def idle(self) -> bool:
        """Whether no save is under way."""
        return self._save is None or self._save.done()

    def expect(self, name: str, tensors: Tensors) -> None:
        """Begin to make the memory for copies of a model on CUDA, after what was begun before. Without it the first
        `stage` does, and takes seconds for every ten GB. Called again, it makes what does not fit any more."""
        buffers = self._buffers.setdefault(name, {})
        shapes = {
            place: torch.empty_like(each, device="meta") for place, each in _nested_places("", tensors) if each.is_cuda
        }
        device, before = current_device(), self._making[-1:]

        def make() -> None:
            for thread in before:
                thread.join(BUFFER_SECONDS)
            try:
                with torch.cuda.device(device):
                    for place, shape in shapes.items():
                        if not _same_shapes(buffers.get(place), shape):
                            buffers[place] = _pinned(shape)
            except Exception as error:  # noqa: BLE001 (the boundary of the thread: `stage` tries again, and raises it)
                log.warning("memory for the copies of %s could not be made in time: %s", name, one_line(error))

        if shapes:
            self._making.append(threading.Thread(target=make, name="memory", daemon=True))
            self._making[-1].start()

    def stage(self, name: str, tensors: Tensors) -> None:
        """Copy a model's tensors to host memory, into the buffers of the last time if they fit.

        Waits for a save that is still under way: the ranks end one a moment after another; and for what was begun by
        `expect`.
        """
        self._settle()
        self._staged[name] = _copied("", tensors, self._buffers.setdefault(name, {}))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def start(
        self,
        root: str,
        attempt: str,
        state: TrainerState,
        names: Sequence[str],
        keep: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Begin to commit `state` and what was staged under `names`, then to prune down to `keep` checkpoints.

        See `sharded.save`, whose tree has these names. A pruning that fails is left to the next save.
        """
        self._settle()
        self._staged = {name: self._staged[name] for name in names}
        self._buffers = {name: self._buffers[name] for name in names}
        outcome: Future[Checkpoint] = Future()
        leads = _leads(group)

        def work() -> None:
            try:
                checkpoint = save(root, attempt, state, dict(self._staged), group=group)
                _prune(checkpoint, keep, group)
                self.ended = time.monotonic()
                outcome.set_result(checkpoint)
            except CheckpointError as error:
                fail(error)
            except Exception as error:  # noqa: BLE001 (the boundary of the thread: `result` reports it)
                reason = one_line(error)
                fail(CheckpointError(f"cannot save {state.job}-{state.step}: {reason}"))

        def fail(error: CheckpointError) -> None:
            if leads:  # at once: whoever asks for the result may be held up, and be ended before
                log.warning("%s-%d is not committed: %s", state.job, state.step, error)
            self.ended = time.monotonic()
            outcome.set_exception(error)

        self._save = outcome
        threading.Thread(target=work, name="checkpoint", daemon=True).start()

    def result(self) -> Checkpoint:
        """What the last save made, or its `CheckpointError`; only when it is idle."""
        if self._save is None:
            raise CheckpointError("no save was started")
        return self._save.result(timeout=0)

    def forget(self) -> None:
        """Give the memory of the copies back; no save is under way."""
        self._settle()
        self._buffers.clear()
        self._staged.clear()

    def _settle(self) -> None:
        until = time.monotonic() + BUFFER_SECONDS
        for thread in self._making:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                told = f"memory for a commit is still being made after {BUFFER_SECONDS:g} s"
                raise CheckpointError(f"{told}: the node may be short of it; --dry-run says how much a trainer needs")
        self._making.clear()
        if self._save is None:
            return
        try:
            self._save.exception(timeout=COMPLETION_SECONDS)
        except TimeoutError:
            raise CheckpointError(f"the save before is still under way after {COMPLETION_SECONDS:.0f} s") from None


@torch.no_grad()
def _copied(place: str, value: Any, buffers: dict[str, Tensor]) -> Any:
    """A copy in host memory of what lies at this place of a tree, in the buffers that fit."""
    if isinstance(value, dict):
        return {name: _copied(f"{place}.{name}", inner, buffers) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(f"{place}.{index}", inner, buffers) for index, inner in enumerate(value))
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if not _same_shapes(buffers.get(place), value):
        buffers[place] = _pinned(value) if value.is_cuda else torch.empty_like(value, device="cpu", requires_grad=False)
    buffer = buffers[place]
    _local(buffer).copy_(_local(value), non_blocking=True)
    return buffer


def _nested_places(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree and where they are, named as `_copied` names them."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, dict | list | tuple):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in inner:
            yield from _nested_places(f"{place}.{name}", each)


def _pinned(value: Tensor) -> Tensor:
    """Pinned memory for a copy; of a distributed tensor, for this rank's shard."""
    memory = pinned_like(_local(value))
    if not isinstance(value, DTensor):
        return memory
    whole = cast(Any, value.detach())
    names, spec = whole.__tensor_flatten__()
    inner = {name: getattr(whole, name) for name in names} | {"_local_tensor": memory}
    return cast(Tensor, whole.__tensor_unflatten__(inner, spec, value.shape, value.stride()))


def _prune(checkpoint: Checkpoint, keep: int, group: dist.ProcessGroup | None) -> None:
    if not _leads(group):
        return
    try:
        prune(checkpoint, keep)
    except CheckpointError as error:
        log.warning("old checkpoints stay until the next commit: %s", error)


def _leads(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return cast(Tensor, cast(Any, tensor).to_local()) if isinstance(tensor, DTensor) else tensor


def _same_shapes(one: Tensor | None, other: Tensor) -> bool:
    """Whether `one` can hold what `other` does, at the same place of the whole tensor."""
    if one is None:
        return False
    mine, theirs = _local(one), _local(other)
    if isinstance(one, DTensor) and isinstance(other, DTensor) and _spread(one) != _spread(other):
        return False
    return type(one) is type(other) and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def _spread(tensor: DTensor) -> Any:
    return tensor.device_mesh, tensor.placements
