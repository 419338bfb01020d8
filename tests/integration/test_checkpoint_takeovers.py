"""Checkpoints of a run that a later attempt took over: whose commits count, and who prunes what."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints import Fence, TrainerState, newest_checkpoint, prune, sharded_state
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.errors import CheckpointError, SupersededError
from tests.support.runs.checkpoint_cases import changed, checkpoint_names, commit, newest_step, tensors

pytestmark = pytest.mark.integration


def test_a_later_attempt_replaces_the_commit_of_an_earlier_one(root: str) -> None:
    commit(root, 50, "1-0")
    Fence(root, "2-0").claim()
    newest = save(root, "2-0", TrainerState(job="rl", step=50), tensors(8.0))
    found = newest_checkpoint(root, hashes=True)
    assert found is not None
    assert found.manifest.attempt == "2-0"
    into = tensors(0.0)
    load_shards(found, into)
    assert into["taken"] == 8
    assert prune(newest, keep=2) == ["rl-50/1-0"]


def test_an_attempt_that_was_taken_over_cannot_commit(root: str) -> None:
    Fence(root, "1-0").claim()
    commit(root, 25, "1-0")
    Fence(root, "2-0").claim()
    with pytest.raises(CheckpointError, match=r"attempt 2-0 has taken over .*; attempt 1-0 must write nothing more"):
        commit(root, 50, "1-0")
    assert newest_step(root) == 25


@pytest.fixture
def resumed(disk: str) -> str:
    """Attempt 1-0 committed 100 and 150; 1-1 went on from 100, since 150 could not be loaded."""
    Fence(disk, "1-0").claim()
    for step in (100, 150):
        commit(disk, step)
    owner = Fence(disk, "1-1")
    owner.claim()
    changed(Path(disk) / "rl-150/1-0/__0_0.distcp")
    owner.keep(["rl-100/1-0"])
    return disk


def test_a_commit_that_was_refused_counts_for_nobody_from_then_on(
    resumed: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest_step(resumed) == 100
    assert "rl-150 is skipped: rl-150/1-0 was refused, or came after attempt 1-1 took over" in caplog.text
    for step, kept in ((110, [100, 110, 150]), (120, [110, 120, 150])):
        prune(commit(resumed, step, "1-1"), keep=2)
        assert checkpoint_names(resumed) == ["ancestry", *(f"rl-{each}" for each in kept)]
        assert newest_step(resumed, hashes=True) == step
    prune(commit(resumed, 160, "1-1"), keep=2)
    assert checkpoint_names(resumed) == ["ancestry", "rl-120", "rl-160"], "what was refused goes in its turn"


def test_a_later_attempt_knows_what_an_earlier_one_refused(resumed: str) -> None:
    commit(resumed, 110, "1-1")
    Fence(resumed, "1-2").claim()
    assert newest_step(resumed) == 110, "of the attempt before, all commits count until it has chosen"
    Fence(resumed, "1-2").keep(["rl-100/1-0"])
    assert newest_step(resumed) == 100


def test_what_was_just_committed_stays_whatever_else_claims_to_be_newer(disk: str) -> None:
    for step in (100, 150, 200):
        newest = commit(disk, step)
    own = save(disk, "1-1", TrainerState(job="rl", step=110), tensors(1.0))
    prune(own, keep=2)
    assert newest_step(disk) == newest.manifest.step
    assert checkpoint_names(disk) == ["rl-100", "rl-110", "rl-150", "rl-200"]


class Zombie:
    """Attempt 1-0, which hangs right before it writes COMPLETE of step 150; `wake` lets that go through."""

    def __init__(self, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        Fence(root, "1-0").claim()
        commit(root, 100)
        held: list[Callable[[], None]] = []
        put = Storage.put

        def hold(storage: Storage, name: str, data: bytes) -> None:
            if name.endswith("COMPLETE"):
                held.append(lambda: put(storage, name, data))
            else:
                put(storage, name, data)

        with monkeypatch.context() as patched:
            patched.setattr(Storage, "put", hold)
            self.checkpoint = commit(root, 150)
        self.wake = held[0]


@pytest.fixture
def zombie(root: str, monkeypatch: pytest.MonkeyPatch) -> Zombie:
    return Zombie(root, monkeypatch)


def taken_over(root: str) -> None:
    """Attempt 1-1 takes over from 1-0, and goes on from 100."""
    owner = Fence(root, "1-1")
    owner.claim()
    owner.keep(["rl-100/1-0"])


def test_a_commit_that_comes_late_does_not_count(root: str, zombie: Zombie) -> None:
    taken_over(root)
    zombie.wake()
    assert newest_step(root) == 100
    commit(root, 110, "1-1")
    assert newest_step(root) == 110


def test_a_late_commit_of_the_same_step_does_not_replace_the_owners(root: str, zombie: Zombie) -> None:
    taken_over(root)
    owned = save(root, "1-1", TrainerState(job="rl", step=150), tensors(151.0))
    zombie.wake()
    assert newest_checkpoint(root, hashes=True) == owned


def test_an_attempt_that_was_taken_over_prunes_nothing(
    root: str, zombie: Zombie, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over(root)
    write = sharded_state._write_shards

    def wake(*arguments: Any) -> Any:
        written = write(*arguments)
        zombie.wake()
        with pytest.raises(SupersededError):
            prune(zombie.checkpoint, keep=1)
        return written

    monkeypatch.setattr(sharded_state, "_write_shards", wake)
    owned = save(root, "1-1", TrainerState(job="rl", step=150), tensors(151.0))
    into = tensors(0.0)
    load_shards(owned, into)
    assert into["taken"] == 151
    assert Storage(root).folders() == ["ancestry", "rl-100", "rl-150"]


def test_a_pruning_that_hangs_removes_nothing_of_the_next_owner(
    root: str, zombie: Zombie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listed, was asked whether it may, and hangs in its first removal."""
    for step in (40, 50):
        commit(root, step)
    zombie.wake()
    remove, hung = Storage.remove, list[str]()

    def hang(storage: Storage, name: str) -> None:
        if not hung:
            hung.append(name)
            taken_over(root)
            for step in (110, 150):
                commit(root, step, "1-1")
        remove(storage, name)

    monkeypatch.setattr(Storage, "remove", hang)
    with pytest.raises(SupersededError):
        prune(zombie.checkpoint, keep=2)
    assert hung == ["rl-50/1-0/COMPLETE"]
    assert newest_step(root, hashes=True) == 150
