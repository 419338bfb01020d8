"""A checkpoint that somebody else wrote: nothing in it is run."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from pipeline.checkpoints import Checkpoint, TrainerState
from pipeline.checkpoints.safe_metadata import read_metadata
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.errors import CheckpointError


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def tree(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), value, dtype=torch.bfloat16), "b": torch.ones(3)}, "taken": int(value)}


def a_checkpoint(root: Path) -> Checkpoint:
    return save(str(root), "1-0", TrainerState(job="rl", step=1), tree(1.0))


def test_what_a_run_of_ours_wrote_is_read(tmp_path: Path) -> None:
    into = tree(0.0)
    load_shards(a_checkpoint(tmp_path), into)
    assert into["taken"] == 1
    assert torch.equal(into["model"]["w"], torch.full((4, 3), 1.0, dtype=torch.bfloat16))


def test_metadata_that_is_a_trap_is_refused_and_not_sprung(tmp_path: Path) -> None:
    mark = tmp_path / "sprung"
    with pytest.raises(CheckpointError, match=r"nothing of it was run; restore from a checkpoint that a run of yours"):
        read_metadata(pickle.dumps(Trap(mark)), ".metadata")
    assert not mark.exists()


def test_metadata_that_was_replaced_is_refused_and_not_sprung(tmp_path: Path) -> None:
    checkpoint, mark = a_checkpoint(tmp_path / "root"), tmp_path / "sprung"
    (Path(checkpoint.location) / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(CheckpointError):
        load_shards(checkpoint, tree(0.0))
    assert not mark.exists()


def test_a_plain_value_that_is_a_trap_is_refused_and_not_sprung(tmp_path: Path) -> None:
    mark, into = tmp_path / "sprung", tree(0.0) | {"taken": Trap(tmp_path / "sprung")}
    checkpoint = save(str(tmp_path / "root"), "1-0", TrainerState(job="rl", step=1), into)
    with pytest.raises(CheckpointError, match=r"taken is not what .* nothing of it was run"):
        load_shards(checkpoint, tree(0.0))
    assert not mark.exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(Metadata)], ids=repr)
def test_a_file_that_is_no_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata is not what torch\.distributed\.checkpoint writes"):
        read_metadata(data, ".metadata")
