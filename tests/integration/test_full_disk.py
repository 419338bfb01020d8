"""A disk that is full at any moment of a save: the checkpoint before stands, and one line names the reason."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.checkpoints import fsspec_storage, newest_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.sharded_state import load_shards
from pipeline.errors import CheckpointError
from pipeline.utils.disk_faults import FileOperation, full_disk, injected
from tests.fakes.full_disk import room_for
from tests.support.runs.checkpoint_cases import commit, newest_step, tensors

pytestmark = pytest.mark.integration


@contextmanager
def full_from(folder: str, number: int) -> Iterator[list[str]]:
    """The disk is full from the given creation or write on; yields the files that were refused."""
    refused: list[str] = []
    count = 0
    refuse = full_disk(Path(folder))

    def rule(operation: FileOperation) -> None:
        nonlocal count
        if operation.takes_room and operation.path.is_relative_to(folder):
            count += 1
            if count >= number:
                refused.append(operation.path.name)
                refuse(operation)

    with injected(rule):
        yield refused


def test_a_disk_that_is_full_from_any_file_on_costs_only_that_checkpoint(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_storage, "FINAL_WRITE_TIMEOUT", 0.2)  # the disk stays full, however long a save retries
    commit(disk, 25)
    first_refused = []
    for number in range(1, 60):
        with full_from(disk, number) as refused:
            if refused_nothing(disk, refused):
                break
        first_refused.append(refused[0])
        assert newest_step(disk, hashes=True) == 25, refused
        Storage(disk).remove("rl-50")  # so that the next save creates each file and folder again
    else:
        pytest.fail("a save makes more files than expected")
    # Each file was the first one that found no room. Documents are written to `.<name>.<unique>`.
    names = [re.sub(r"^\.?(.*?)(\.tmp|\.\d+\.[0-9a-f]+)?$", r"\1", name) for name in first_refused]
    assert names == ["rl-50", "1-0", "__0_0.distcp", "metadata", "state.msgpack", "manifest.json", "COMPLETE"]
    assert newest_step(disk, hashes=True) == 50
    restored = tensors(0.0)
    load_shards(newest_checkpoint(disk), restored)  # type: ignore[arg-type]
    assert restored["model"]["w"].eq(50.0).all()


def refused_nothing(disk: str, refused: list[str]) -> bool:
    """Save step 50; whether that succeeded. A failed save is one line with the reason and the place."""
    try:
        commit(disk, 50)
    except CheckpointError as error:
        assert refused
        text = str(error)
        assert "No space left on device" in text
        assert disk in text
        assert "\n" not in text
        return False
    assert not refused
    return True


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_a_disk_that_takes_only_a_part_of_a_file_costs_only_that_checkpoint(disk: str, size: int) -> None:
    commit(disk, 25)
    with room_for(size), pytest.raises(CheckpointError, match="File too large"):
        commit(disk, 50)
    assert newest_step(disk, hashes=True) == 25
    commit(disk, 50)
    assert newest_step(disk, hashes=True) == 50
