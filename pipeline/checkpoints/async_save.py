"""Asynchronous saving: training continues while a background thread writes copies of the tensors.

One rank's saver owns the copies in host memory, the threads that allocate this memory early, and the thread that
writes. Tensors may change as soon as `stage` has returned. At most one save is in progress. Any failure becomes a
`CheckpointError`.

On every rank, in the same order, with the one `AsyncSaver` of its `RankState`:

    saver.expect("policy", worker.state())                    # early: allocates memory for the copies
    saver.stage("policy", worker.state())                     # the only call that blocks training
    saver.start(root, attempt, state, ["policy"], 2, group)   # returns at once; `group` is used for saves only
    …steps…
    if saver.idle: checkpoint = saver.result()                # the same outcome on every rank
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
"""Maximum delay between the first and the slowest rank at the end of a save."""
BUFFER_SECONDS = 300.0
"""Time limit for a running allocation that is needed now. Shorter than the timeout of a rank's operation."""


class AsyncSaver:
    """One rank's part of the saves of a trainer, one at a time.

    Attributes:
        ended: end time of the last save, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, dict[str, Tensor]] = {}
        """For each model of the newest save, or staged for the next one: buffers by path in the model's tree."""
        self._staged: dict[str, Tensors] = {}
        self._save: Future[Checkpoint] | None = None
        self._allocations: list[threading.Thread] = []
        self.ended = 0.0

    @property
    def idle(self) -> bool:
        """Whether no save is in progress."""
        return self._save is None or self._save.done()

    def expect(self, name: str, tensors: Tensors) -> None:
        """Start to allocate pinned memory for the copies of a model's CUDA tensors, after earlier allocations.

        Without this call the first `stage` allocates, which takes seconds per 10 GB. Another call with other tensors
        replaces the buffers that no longer fit.
        """
        buffers = self._buffers.setdefault(name, {})
        shapes = {
            path: torch.empty_like(tensor, device="meta")
            for path, tensor in _tensor_paths("", tensors)
            if tensor.is_cuda
        }
        # A new thread uses device 0 by default, and would create a context there.
        device, before = current_device(), self._allocations[-1:]

        def allocate() -> None:
            for thread in before:
                thread.join(BUFFER_SECONDS)
            try:
                with torch.cuda.device(device):
                    for path, shape in shapes.items():
                        if not _same_shapes(buffers.get(path), shape):
                            buffers[path] = _pinned(shape)
            except Exception as error:  # noqa: BLE001 (the boundary of the thread: `stage` tries again, and raises it)
                log.warning("memory for the copies of %s could not be made in time: %s", name, one_line(error))

        if shapes:
            self._allocations.append(threading.Thread(target=allocate, name="memory", daemon=True))
            self._allocations[-1].start()

    def stage(self, name: str, tensors: Tensors) -> None:
        """Copy a model's tensors to host memory, into the buffers of the previous save if they fit.

        Waits for allocations that `expect` has started, and for a running save: its ranks end at different times.
        """
        self._wait_until_idle()
        self._staged[name] = _copied("", tensors, self._buffers.setdefault(name, {}))
        if torch.cuda.is_available():  # the copies are asynchronous, and the tensors may change after the return
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
        """Start a thread that saves `state` and the models staged under `names`, then prunes to `keep` checkpoints.

        `sharded_state.save` gets a tree with these names. A failed pruning is repeated by the next save.
        """
        self._wait_until_idle()  # one save at a time: two would write the same buffers
        # Models that are not part of this save lose their copies and buffers.
        self._staged = {name: self._staged[name] for name in names}
        self._buffers = {name: self._buffers[name] for name in names}
        outcome: Future[Checkpoint] = Future()
        leads = _leads(group)

        def work() -> None:
            try:
                # Collective over `group`, a separate gloo group: its collectives must not interleave with those
                # of the training that continues meanwhile.
                checkpoint = save(root, attempt, state, dict(self._staged), group=group)
                _prune(checkpoint, keep, group)
                self.ended = time.monotonic()
                outcome.set_result(checkpoint)
            except CheckpointError as error:
                fail(error)
            except Exception as error:  # the boundary of the thread: `result` reports it
                log.error("an unexpected error fails the save of %s-%d", state.job, state.step, exc_info=error)
                failure = CheckpointError(f"cannot save {state.job}-{state.step}: {one_line(error)}")
                failure.__cause__ = error
                fail(failure)

        def fail(error: CheckpointError) -> None:
            if leads:  # logged at once: the process may be ended before it asks for the result
                log.warning("%s-%d is not committed: %s", state.job, state.step, error)
            self.ended = time.monotonic()
            outcome.set_exception(error)

        self._save = outcome
        threading.Thread(target=work, name="checkpoint", daemon=True).start()

    def result(self) -> Checkpoint:
        """The checkpoint of the last save, or its `CheckpointError`. Call this only while the saver is idle."""
        if self._save is None:
            raise CheckpointError("no save was started")
        return self._save.result(timeout=0)

    def forget(self) -> None:
        """Release the memory of the copies, after allocations and a running save have ended."""
        self._wait_until_idle()
        self._buffers.clear()
        self._staged.clear()

    def _wait_until_idle(self) -> None:
        until = time.monotonic() + BUFFER_SECONDS
        for thread in self._allocations:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                problem = f"memory for a checkpoint is still being allocated after {BUFFER_SECONDS:g} s"
                raise CheckpointError(f"{problem}: the node may be short of it; --dry-run prints a trainer's memory")
        self._allocations.clear()
        if self._save is None:
            return
        try:
            self._save.exception(timeout=COMPLETION_SECONDS)
        except TimeoutError:
            raise CheckpointError(f"the previous save is still running after {COMPLETION_SECONDS:.0f} s") from None


@torch.no_grad()
def _copied(path: str, value: Any, buffers: dict[str, Tensor]) -> Any:
    """A copy in host memory of the subtree `value` at `path`, in existing buffers if they fit."""
    if isinstance(value, dict):
        return {name: _copied(f"{path}.{name}", inner, buffers) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(f"{path}.{index}", inner, buffers) for index, inner in enumerate(value))
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if not _same_shapes(buffers.get(path), value):
        buffers[path] = _pinned(value) if value.is_cuda else torch.empty_like(value, device="cpu", requires_grad=False)
    buffer = buffers[path]
    # Pinned memory makes the copy asynchronous; `stage` waits for all copies at once.
    _local(buffer).copy_(_local(value), non_blocking=True)
    return buffer


def _tensor_paths(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with their paths, as in `_copied`."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for name, child in children:
            yield from _tensor_paths(f"{path}.{name}", child)


def _pinned(value: Tensor) -> Tensor:
    """Pinned memory for a copy of a tensor; for a distributed tensor, of this rank's shard."""
    memory = pinned_like(_local(value))
    if not isinstance(value, DTensor):
        return memory
    # Rebuild the DTensor around the pinned local shard, with the same mesh, placements and global shape.
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
        log.warning("old checkpoints stay until the next checkpoint: %s", error)


def _leads(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; any other tensor itself."""
    return cast(Tensor, cast(Any, tensor).to_local()) if isinstance(tensor, DTensor) else tensor


def _same_shapes(one: Tensor | None, other: Tensor) -> bool:
    """Whether buffer `one` fits `other`: same shape, type and, for distributed tensors, same mesh and placements."""
    if one is None:
        return False
    mine, theirs = _local(one), _local(other)
    if isinstance(one, DTensor) and isinstance(other, DTensor) and _spread(one) != _spread(other):
        return False
    return type(one) is type(other) and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def _spread(tensor: DTensor) -> Any:
    return tensor.device_mesh, tensor.placements
