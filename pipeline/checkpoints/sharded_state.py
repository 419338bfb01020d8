"""Saving and loading sharded tensors, as collective operations of the trainer's ranks.

Built on `torch.distributed.checkpoint` (DCP). `save` returns on every rank only after the checkpoint is complete, or
raises the same `CheckpointError` on every rank. `load_shards` fills the given tensors from a checkpoint, with any
number of ranks, or reports the differences on every rank. The process group's timeout limits every step.

`save` has three parts: begin (rank 0), write shards (every rank), complete (rank 0). The tensors must not change until
it returns; `pipeline.checkpoints.async_save` passes copies, so that training can continue.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from pipeline.checkpoints.block_hashes import FileRecord
from pipeline.checkpoints.checkpoint_store import Checkpoint, begin_checkpoint, checkpoint_name, complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.safe_metadata import read_metadata, read_value
from pipeline.checkpoints.shard_io import METADATA, RecordingWriter, VerifyingReader
from pipeline.checkpoints.trainer_state import TrainerState
from pipeline.errors import CheckpointError, DamagedCheckpointError, one_line

log = logging.getLogger(__name__)

Tensors = dict[str, Any]
"""A nested tree of tensors, sharded or not, and plain values."""
_MAX_SHOWN = 3
T = TypeVar("T")


def save(
    root: str, attempt: str, state: TrainerState, tensors: Tensors, *, group: dist.ProcessGroup | None = None
) -> Checkpoint:
    """Save `tensors` (each rank its shards) and rank 0's `state`. Job and step must be equal on all ranks.

    If this attempt has saved the step already, that checkpoint is returned: the tensors of a step never change. A
    checkpoint of this step by another attempt is superseded by the write of COMPLETE. Raises `CheckpointError` on every
    rank.
    """
    ranks = Ranks(group)
    storage = Storage(root)
    existing = ranks.first_decides(lambda: begin_checkpoint(storage, state, attempt))
    if existing is not None:
        return existing
    folder = f"{checkpoint_name(state.job, state.step)}/{attempt}"
    shards = _write_shards(storage, folder, tensors, ranks)
    return ranks.first_decides(lambda: complete_checkpoint(storage, state, attempt, shards, ranks.count))


def load_shards(checkpoint: Checkpoint, tensors: Tensors, *, group: dist.ProcessGroup | None = None) -> TrainerState:
    """Fill `tensors` in place from the checkpoint. Returns the saved position.

    The top-level names of the tree select a part of the checkpoint; the rest is not read. The number of ranks may
    differ from that of the save; each rank reads and verifies only the blocks that it needs.

    Raises:
        CheckpointError: names, shapes or types of the tensors differ from the checkpoint. No tensor was changed.
        DamagedCheckpointError: on every rank, if one rank read damaged data. The tensors are unusable.
    """
    ranks = Ranks(group)
    state, metadata = ranks.first_decides(lambda: (checkpoint.state(), checkpoint.read(METADATA)))
    reader = VerifyingReader(checkpoint, read_metadata(metadata, f"{checkpoint.location}/{METADATA}"))
    planner = _ComparingPlanner(checkpoint.name)
    try:
        with _needs_no_group():
            state_dict_loader.load(tensors, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _translate(f"cannot load {checkpoint.location}", error) from error
    return state


class Ranks:
    """The ranks that save or load together; a single rank if no process group exists."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if distributed else 0
        self.count = dist.get_world_size(group) if distributed else 1

    def first_decides(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return or raise its outcome on every rank."""
        outcome: list[Any] = [_outcome(work) if self.rank == 0 else None]
        if self.count > 1:
            dist.broadcast_object_list(outcome, group_src=0, group=self.group)
        return _value(outcome[0])  # type: ignore[no-any-return]

    def gathered(self, work: Callable[[], dict[str, T]]) -> dict[str, T]:
        """The merged dictionaries of all ranks, on every rank. Raises the error of the lowest rank that failed."""
        outcomes: list[Any] = [None] * self.count
        mine = _outcome(work)
        if self.count > 1:
            dist.all_gather_object(outcomes, mine, group=self.group)
        outcomes[self.rank] = mine
        return {name: value for outcome in outcomes for name, value in _value(outcome).items()}


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except CheckpointError as error:
        return error
    except Exception as error:  # the other ranks wait for the outcome, whatever it is
        log.error("an unexpected error fails the checkpoint on all ranks", exc_info=error)
        failure = CheckpointError(one_line(error))
        failure.__cause__ = error  # on this rank: an error loses its cause on the way to another one
        return failure


def _value(outcome: Any) -> Any:
    if isinstance(outcome, CheckpointError):
        raise outcome
    return outcome


@contextmanager
def _needs_no_group() -> Iterator[None]:
    """Silence DCP's warning about a missing process group, for a single process."""
    if dist.is_available() and dist.is_initialized():
        yield  # warning filters are global to all threads: do not touch them while training runs
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _write_shards(storage: Storage, folder: str, tensors: Tensors, ranks: Ranks) -> dict[str, FileRecord]:
    """Write every rank's shards. Returns the records of all files, by file name, on every rank."""
    writer = RecordingWriter(storage.url(folder), flush=storage.local)
    try:
        with _needs_no_group():
            state_dict_saver.save(tensors, storage_writer=writer, process_group=ranks.group)
    except CheckpointException as error:
        raise _translate(f"cannot save {storage.url(folder)}", error) from error
    # Every file that the metadata names must have been written by some rank, else the checkpoint is incomplete.
    written = ranks.gathered(lambda: writer.records)
    if unwritten := ranks.first_decides(lambda: writer.named) - written.keys():
        raise CheckpointError(f"cannot save {storage.url(folder)}: nobody wrote {', '.join(sorted(unwritten))}")
    return written


class _ComparingPlanner(DefaultLoadPlanner):
    """A load planner that refuses a checkpoint with other names, shapes or types before any tensor is read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata if self.metadata else {}
        if differing := _differences(self.state_dict, saved, tuple(f"{name}." for name in self.original_state_dict)):
            if all(line.only_type for line in differing if line.in_both) and any(line.in_both for line in differing):
                # A type may have further tensors, such as the scales of moments in float8.
                shown = _shown([line for line in differing if line.in_both])
                hint = "use model.dtype and optim.state_dtype with which it was saved"
                raise CheckpointError(f"{self._name} has tensors of other types: {shown}; {hint}")
            raise CheckpointError(f"{self._name} is of another model: {_shown(differing)}")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], read_value(value, name))


class _Difference(NamedTuple):
    text: str
    in_both: bool = False
    only_type: bool = False


def _differences(expected: Tensors, everything: Mapping[str, Any], parts: tuple[str, ...]) -> list[_Difference]:
    saved = {name: tensor for name, tensor in everything.items() if f"{name}.".startswith(parts)}
    lines = [_Difference(f"{name} is not in it") for name in sorted(expected.keys() - saved.keys())]
    lines += [_Difference(f"{name} is only in it") for name in sorted(saved.keys() - expected.keys())]
    for name in sorted(expected.keys() & saved.keys()):
        mine, theirs = _shape_text(expected[name]), _shape_text(saved[name])
        if mine != theirs:
            same_shape = mine.partition(" ")[2] == theirs.partition(" ")[2]
            lines.append(_Difference(f"{name} is {mine} here and {theirs} there", in_both=True, only_type=same_shape))
    return lines


def _shown(differing: Sequence[_Difference]) -> str:
    more = f" and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    return "; ".join(line.text for line in differing[:_MAX_SHOWN]) + more


def _shape_text(value: Any) -> str:
    """Type and shape of a tensor, or `a value` for any other object."""
    if isinstance(value, TensorStorageMetadata):
        return f"{value.properties.dtype} {tuple(value.size)}".removeprefix("torch.")
    if isinstance(value, BytesStorageMetadata) or not hasattr(value, "shape"):
        return "a value"
    return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")


def _translate(what: str, error: CheckpointException) -> CheckpointError:
    """The error of a rank that read damaged data, if there is one, else that of the lowest failed rank, on one line."""
    rank, (reason, _) = min(
        error.failures.items(), key=lambda item: (not isinstance(item[1][0], DamagedCheckpointError), item[0])
    )
    if isinstance(reason, CheckpointError):
        return reason
    return CheckpointError(f"{what}: rank {rank}: {one_line(reason)}")
