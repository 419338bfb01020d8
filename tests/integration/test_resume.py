"""Save, kill, resume: the trainer's three models, its optimizers and its ledger, in worlds of 1, 2 and 4 real ranks.

Tolerances, float32 on the CPU: none in a world of as many ranks. In another one, where sums over ranks are rounded
otherwise, three further steps keep metrics within 1e-6, and each parameter within 1e-6 and each moment within 1e-5 of
the largest of its tensor. What was saved is loaded bit for bit by any number of ranks.
"""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints import newest_checkpoint
from pipeline.utils.waiting import wait_for
from tests.support.models.tiny import write_tiny
from tests.support.ranks import checkpoint_worlds as worlds
from tests.support.ranks.forked_ranks import end_ranks, run_ranks, start_ranks

pytestmark = pytest.mark.integration
CLOSE, MOMENTS_CLOSE = 1e-6, 1e-5
State = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that committed step 3, trained to step 6, and was killed while it wrote that commit.

    `first/` holds what it computed.
    """
    run = tmp_path_factory.mktemp("resume") / "run"
    write_tiny(run / "model")
    processes = start_ranks(2, worlds.world, worlds.first, run, "1-0", run / "first")
    try:
        wait_for("the second commit to be under way", half_written(run, processes), 120)
    finally:
        end_ranks(processes)
    return run


def half_written(run: Path, processes: Sequence[BaseProcess]) -> Callable[[], bool]:
    """Whether rank 1 has written its shards, and rank 0 some of its own."""

    def look() -> bool:
        assert all(process.exitcode is None for process in processes), "a rank ended early"
        return (run / "first" / "reached").exists() and any((run / "checkpoints/rl-6/1-0").glob("__1_*"))

    return look


@pytest.fixture(scope="module")
def by_two(killed: Path) -> Path:
    """With models that take turns on the device, which must change nothing."""
    return resumed(killed, 2, colocated=True)


@pytest.fixture(scope="module")
def by_four(killed: Path) -> Path:
    return resumed(killed, 4)


def resumed(killed: Path, ranks: int, *, colocated: bool = False) -> Path:
    """A copy of the run after a second attempt went on from the commit; `resume/` holds what that computed."""
    run = killed.with_name(f"by-{ranks}")
    shutil.copytree(killed, run)
    run_ranks(ranks, worlds.world, worlds.resume, run, "1-1", run / "resume", colocated)
    return run


def steps_in(folder: Path) -> list[dict[str, float]]:
    steps: list[dict[str, float]] = json.loads((folder / "steps.json").read_text())
    return steps


def state_in(folder: Path) -> State:
    state: State = torch.load(folder / "state.pt", weights_only=True)
    assert set(state) == set(worlds.NAMES)
    assert all(any(".exp_avg" in place for place in state[name]) for name in ("policy", "critic"))
    return state


def assert_equal(one: State, other: State) -> None:
    """Bit for bit."""
    for name in worlds.NAMES:
        assert one[name].keys() == other[name].keys()
        for place, value in one[name].items():
            same = torch.equal(value, other[name][place]) if torch.is_tensor(value) else value == other[name][place]
            assert same, f"{name}{place}"


def test_a_commit_that_was_under_way_when_all_ranks_were_killed_does_not_count(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        newest = newest_checkpoint(str(killed / "checkpoints"), hashes=True)
    assert newest is not None
    assert newest.manifest.step == worlds.SAVED
    assert "rl-6 is skipped: rl-6/1-0 has no COMPLETE" in caplog.text


def test_a_resumed_run_takes_the_very_steps_of_the_uninterrupted_one(killed: Path, by_two: Path) -> None:
    assert len(steps_in(killed / "first")) == worlds.STEPS - worlds.SAVED
    assert steps_in(by_two / "resume") == steps_in(killed / "first")
    assert_equal(state_in(by_two / "resume"), state_in(killed / "first"))


def test_ranks_of_which_one_reads_a_damaged_shard_go_on_together_from_the_commit_before(by_two: Path) -> None:
    run = by_two.with_name("damaged")
    shutil.copytree(by_two, run)
    shard = run / "checkpoints/rl-6/1-1/__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    run_ranks(2, worlds.world, worlds.fall_back, run, "1-2", run / "back")
    run_ranks(2, worlds.world, worlds.fall_back, run, "1-3", run / "again")
    assert_equal(state_in(run / "back"), state_in(run / "again"))


def test_a_run_that_is_resumed_by_more_ranks_takes_the_same_steps_within_rounding(killed: Path, by_four: Path) -> None:
    for mine, truth in zip(steps_in(by_four / "resume"), steps_in(killed / "first"), strict=True):
        for name in [name for name in truth if name.endswith("flops")]:
            assert mine.pop(name) >= truth.pop(name)  # more ranks compute the prompt of a group that they share
        assert mine == pytest.approx(truth, rel=CLOSE, abs=CLOSE)
    mine, truth = state_in(by_four / "resume"), state_in(killed / "first")
    for name in worlds.NAMES:
        for place, value in truth[name].items():
            if torch.is_tensor(value):
                distance = float((mine[name][place] - value).abs().max() / value.abs().max().clamp(min=CLOSE))
                bound = CLOSE if place.startswith(".model.") else MOMENTS_CLOSE
                assert distance <= bound, f"{name}{place} differs by {distance:.1e}"


def test_what_two_ranks_saved_goes_bit_for_bit_to_four_one_and_two(by_four: Path) -> None:
    run_ranks(1, worlds.world, worlds.copy, by_four, "2-0", by_four / "one")
    run_ranks(2, worlds.world, worlds.fail, by_four, "3-0", by_four / "two")
    truth = state_in(by_four / "resume")
    assert_equal(state_in(by_four / "one"), truth)
    assert_equal(state_in(by_four / "two"), truth)
    newest = newest_checkpoint(str(by_four / "checkpoints"), hashes=True)
    assert newest is not None
    assert (newest.name, newest.manifest.attempt, newest.manifest.world_size) == ("rl-7", "3-0", 2)


def test_a_rank_that_is_lost_in_the_middle_of_a_commit_is_told_soon_and_the_commit_does_not_count(
    killed: Path,
) -> None:
    run = killed.with_name("lost")
    shutil.copytree(killed, run)
    controller, lost = start_ranks(2, worlds.world, worlds.lose_a_rank, run, "1-1", run / "told")
    try:
        for process in (controller, lost):
            process.join(60)
        assert (controller.exitcode, lost.exitcode) == (0, 9)
    finally:
        end_ranks([controller, lost])
    assert (run / "told").exists()


def test_a_commit_may_take_longer_than_any_collective_of_training(tmp_path: Path) -> None:
    run_ranks(2, worlds.commit_slowly, str(tmp_path / "checkpoints"))
    found = newest_checkpoint(str(tmp_path / "checkpoints"))
    assert found is not None
    assert (found.manifest.step, found.manifest.world_size) == (1, 2)
