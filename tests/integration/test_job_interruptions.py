"""How jobs that stand alone end early."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.errors import CheckpointError, TrainingError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.offline.job_execution import run_job_file, run_job_files
from pipeline.utils import atomic_dirs
from tests.support.models.jobs import STEPS, assert_same, config_of, events, write_job

pytestmark = pytest.mark.integration


def interrupt_before(step: int) -> Callable[[], None]:
    """A pulse that ends the execution before step `step` (0, 1, …)."""
    pulses = iter(range(step + 1))

    def pulse() -> None:
        if next(pulses) == step:
            raise Interrupted("told to stop")

    return pulse


def test_a_job_that_is_told_to_stop_commits_its_steps_and_goes_on_from_there(
    dispatch: RankGroup, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "uninterrupted").mkdir()
    config, file = config_of(model, checkpoint_every=100), write_job(tmp_path, "rl")
    run_job_file(write_job(tmp_path / "uninterrupted", "rl"), dispatch, config)
    with pytest.raises(Interrupted):
        run_job_file(file, dispatch, config, pulse=interrupt_before(3))
    assert events(tmp_path / "rl.jsonl") == ["started", *["step"] * 3, "interrupted"]
    assert (tmp_path / "rl-data" / "manifest.json").exists()
    run_job_file(file, dispatch, config)
    assert events(tmp_path / "rl.jsonl") == ["started", *["step"] * (STEPS - 3), "finished"]
    assert_same(tmp_path / "rl-model", tmp_path / "uninterrupted" / "rl-model")


def test_checkpoints_by_time_change_nothing_of_what_is_trained(
    dispatch: RankGroup, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "by-steps").mkdir()
    run_job_file(write_job(tmp_path / "by-steps", "rl"), dispatch, config_of(model, checkpoint_every=100))
    caplog.set_level("INFO")
    run_job_file(write_job(tmp_path, "rl"), dispatch, config_of(model, checkpoint_every=100, checkpoint_seconds=1e-6))
    assert sum(record.message.startswith("committed ") for record in caplog.records) == STEPS
    assert_same(tmp_path / "rl-model", tmp_path / "by-steps" / "rl-model")


def test_what_a_save_that_did_not_end_left_is_removed_by_the_next_execution(
    dispatch: RankGroup, model: Path, tmp_path: Path
) -> None:
    config, file = config_of(model, checkpoint_every=2), write_job(tmp_path, "rl")
    with pytest.raises(Interrupted):
        run_job_file(file, dispatch, config, pulse=interrupt_before(2))
    unfinished = tmp_path / "rl-state" / "rl-1000" / "dead-0"
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"half a shard")
    run_job_file(file, dispatch, config)
    assert not unfinished.exists()
    assert commits_of(tmp_path / "rl-state")


def commits_of(state: Path) -> list[Path]:
    return sorted(state.glob("rl-*"), key=lambda path: int(path.name.partition("-")[2]))


def damage(commit: Path) -> None:
    """Change one bit of its tensors."""
    (shard,) = commit.glob("*/*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def execute_three_steps(dispatch: RankGroup, config: RunConfig, file: Path) -> None:
    with pytest.raises(Interrupted):
        run_job_file(file, dispatch, config, pulse=interrupt_before(3))


def test_a_job_whose_newest_commit_is_damaged_goes_on_from_the_one_before(
    dispatch: RankGroup, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "uninterrupted").mkdir()
    config, file = config_of(model, checkpoint_every=1), write_job(tmp_path, "rl")
    run_job_file(write_job(tmp_path / "uninterrupted", "rl"), dispatch, config)
    execute_three_steps(dispatch, config, file)
    damage(commits_of(tmp_path / "rl-state")[-1])
    run_job_file(file, dispatch, config)
    assert events(tmp_path / "rl.jsonl") == ["started", *["step"] * (STEPS - 2), "finished"]
    assert_same(tmp_path / "rl-model", tmp_path / "uninterrupted" / "rl-model")


def test_a_job_whose_commits_are_all_damaged_is_refused_until_the_state_is_moved_away(
    dispatch: RankGroup, model: Path, tmp_path: Path
) -> None:
    config, file = config_of(model, checkpoint_every=1), write_job(tmp_path, "rl")
    execute_three_steps(dispatch, config, file)
    for commit in commits_of(tmp_path / "rl-state"):
        damage(commit)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"rl-state: its checkpoints are damaged \(rl-3/.*, rl-2/.*\); restore"
        ):
            run_job_file(file, dispatch, config)
    assert [commit.name for commit in commits_of(tmp_path / "rl-state")] == ["rl-2", "rl-3"]
    (tmp_path / "rl-state").rename(tmp_path / "moved")
    run_job_file(file, dispatch, config)
    assert events(tmp_path / "rl.jsonl") == ["started", *["step"] * STEPS, "finished"]


def test_a_job_takes_over_the_newest_state_that_is_not_damaged(
    dispatch: RankGroup, model: Path, tmp_path: Path
) -> None:
    """Its steps are numbered on from that one."""
    config = config_of(model, checkpoint_every=STEPS - 1)
    run_job_file(write_job(tmp_path, "rl"), dispatch, config)
    whole, newest = commits_of(tmp_path / "rl-state")
    damage(newest)
    run_job_file(write_job(tmp_path, "rl", "second"), dispatch, config)
    assert (whole.name, newest.name) == (f"rl-{STEPS - 1}", f"rl-{STEPS}")
    assert commits_of(tmp_path / "rl-state")[-1].name == f"rl-{STEPS - 1 + STEPS}"


def test_a_queue_that_is_told_to_stop_leaves_its_jobs_where_they_are(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    write_job(tmp_path, "sft")
    with pytest.raises(Interrupted):
        run_job_files(tmp_path, dispatch, config, interrupt_before(0))
    assert events(tmp_path / "sft.jsonl") == ["started", "interrupted"]
    assert (tmp_path / "sft.json").exists()
    assert not (tmp_path / "failed").exists()


def test_an_interruption_forgets_no_failure_of_the_queue(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    for age, file in enumerate([write_job(tmp_path, "rl", "1", checkpoint="gone"), write_job(tmp_path, "sft", "2")]):
        os.utime(file, (1e9 + age, 1e9 + age))
    with pytest.raises(Interrupted):
        run_job_files(tmp_path, dispatch, config, interrupt_before(1))
    assert (tmp_path / "failed" / "1.json").exists()
    with pytest.raises(TrainingError, match=r"^failed: 1\.json \(see .*failed\)$"):
        run_job_files(tmp_path, dispatch, config)
    assert (tmp_path / "done" / "2.json").exists()


def test_an_error_of_the_disk_is_told_in_the_log_and_does_not_stop_a_queue(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, "sft")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_dirs, "replace", full)
    with pytest.raises(TrainingError, match=r"failed: sft\.json"):
        run_job_files(tmp_path, dispatch, config)
    last = json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "failed"
    assert "No space left on device" in last["error"]
    assert "No space left on device" in (tmp_path / "failed" / "sft.error").read_text()
    assert (tmp_path / "sft-data" / "manifest.json").exists()
    assert not dispatch.models
