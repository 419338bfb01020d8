"""The loop that every job runs in."""

import errno
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

import pytest

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import CheckpointError, RollcallError, SupersededError, TrainingError, WeightSyncError
from pipeline.train.loop.grace_period import grace_warning
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.loop.train_loop import CheckpointCadence, TrainLoop
from pipeline.train.throughput import DeviceSpeed, peak_flops, rates
from pipeline.train.train_jobs import Job, RlJob, RlSchedule, StreamInput


class Diary:
    """Remembers what a runner wrote, in order."""

    is_checkpointable = True
    is_near_budget = is_saving = False
    checkpoint_seconds = 0.0

    def __init__(self) -> None:
        self.lines: list[str] = []

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        self.lines.append(f"commit {done}{' and wait' if wait else ''}")

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append(f"note {step} {sorted(metrics)}")


class Failing(Diary):
    """The first commit that is waited for tells that the one before it failed."""

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        super().save_checkpoint(job, done, wait)
        if self.lines.count(f"commit {done} and wait") == 1:
            raise CheckpointError("the disk was full")


class Counting:
    """An algorithm that counts, and is interrupted where it is told to be."""

    def __init__(self, diary: Diary, steps: int, interrupt: str = "", error: type[RollcallError] = Interrupted) -> None:
        self._job = RlJob(inputs=StreamInput(), schedule=RlSchedule(steps=steps, prompts=1))
        self.is_checkpointable = True
        self._diary, self._interrupt, self._error = diary, interrupt, error

    @property
    def job(self) -> Job:
        return self._job

    def begin(self, step: int) -> None:
        self._diary.lines.append(f"begin {step}")

    def step(self, step: int) -> Mapping[str, float]:
        self._reach(f"step {step}")
        return {"loss": 1.0}

    def after_step(self, done: int) -> Mapping[str, float]:
        self._reach(f"follow up {done}")
        return {"sync": 1.0}

    def end(self) -> None:
        self._reach("end")

    def _reach(self, place: str) -> None:
        if place == self._interrupt:
            raise self._error(place)


def run(steps: int, every: int, done: int = 0, interrupt: str = "") -> list[str]:
    diary = Diary()
    runner = TrainLoop(diary, CheckpointCadence(every))
    if interrupt:
        with pytest.raises(Interrupted):
            runner.run(Counting(diary, steps, interrupt), done)
    else:
        runner.run(Counting(diary, steps), done)
    return diary.lines


def commits(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("commit ")]


def test_a_job_commits_at_its_interval_and_at_its_end() -> None:
    lines = run(steps=5, every=2)
    assert commits(lines) == ["commit 2", "commit 4", "commit 5 and wait"]


def test_a_job_commits_early_when_what_waits_for_a_commit_takes_too_much_room() -> None:
    class Crowded(Diary):
        @property
        def is_near_budget(self) -> bool:
            return len(self.lines) > 8 and not commits(self.lines)

    diary = Crowded()
    TrainLoop(diary, CheckpointCadence(100)).run(Counting(diary, 9), 0)
    early, last = commits(diary.lines)
    assert early == f"commit {sum(line.startswith('note') for line in diary.lines[: diary.lines.index(early)])}"
    assert last == "commit 9 and wait"


class Clock:
    """Seconds that pass with each look."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._now = seconds, 0.0

    def __call__(self) -> float:
        self._now += self._seconds
        return self._now


def test_a_job_commits_after_so_many_seconds_whatever_its_steps_take() -> None:
    diary = Diary()
    TrainLoop(diary, CheckpointCadence(1000, seconds=30.0), clock=Clock(4.0)).run(Counting(diary, 9), 0)
    assert commits(diary.lines) == ["commit 3", "commit 6", "commit 9 and wait"]
    assert [line.split()[1] for line in diary.lines if line.startswith("note")] == [str(step) for step in range(1, 10)]


def test_seconds_are_counted_from_the_last_commit_whatever_caused_it() -> None:
    diary = Diary()
    TrainLoop(diary, CheckpointCadence(2, seconds=30.0), clock=Clock(4.0)).run(Counting(diary, 7), 0)
    assert commits(diary.lines) == ["commit 2", "commit 4", "commit 6", "commit 7 and wait"]


def test_no_seconds_are_no_limit() -> None:
    diary = Diary()
    TrainLoop(diary, CheckpointCadence(1000), clock=Clock(1e6)).run(Counting(diary, 9), 0)
    assert commits(diary.lines) == ["commit 9 and wait"]


def test_a_timed_commit_does_not_wait_for_one_that_is_under_way() -> None:
    class Slow(Diary):
        @property
        def is_saving(self) -> bool:
            return len(commits(self.lines)) > 0 and len(self.lines) < 7

    diary = Slow()
    TrainLoop(diary, CheckpointCadence(1000, seconds=1.0), clock=Clock(4.0)).run(Counting(diary, 9), 0)
    assert commits(diary.lines)[:2] == ["commit 1", "commit 5"]


class Measured(Diary):
    checkpoint_seconds = 12.0

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        super().note(job, step, metrics)
        self.rows = [*getattr(self, "rows", []), dict(metrics)]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "slurm",
            "a job that receives a stop signal loses the steps since its last checkpoint; "
            "set cluster.grace_seconds=110",
        ),
        ("local", "the launcher is killed (the first Ctrl-C waits for the checkpoint); set cluster.grace_seconds=110"),
    ],
)
def test_a_step_that_takes_longer_than_the_grace_is_warned_of_once(
    kind: Literal["slurm", "local"], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    diary, cluster = Measured(), ClusterConfig(scheduler=kind, grace_seconds=60)
    TrainLoop(diary, CheckpointCadence(3, cluster=cluster), clock=Clock(60.0)).run(Counting(diary, 9), 0)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("a step takes 60 s and its checkpoint 12 s, longer than cluster.grace_seconds=60: ")
    assert told in warning
    assert diary.rows[-1]["checkpoint/seconds"] == 12.0


def test_a_step_within_the_grace_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    cluster = ClusterConfig(scheduler="slurm", grace_seconds=75)
    TrainLoop(Measured(), CheckpointCadence(3, cluster=cluster), clock=Clock(60.0)).run(Counting(Diary(), 9), 0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_time_that_a_step_waits_for_data_does_not_count_against_the_grace() -> None:
    cluster = ClusterConfig(scheduler="slurm", grace_seconds=60)
    rows = [{"seconds/step": 100.0, "seconds/data": 80.0, "checkpoint/seconds": 12.0}] * 2
    assert grace_warning(cluster, rows) is None
    assert "a step takes 60 s" in str(grace_warning(cluster, [row | {"seconds/data": 40.0} for row in rows]))


def test_one_slow_step_is_not_enough_for_a_warning() -> None:
    cluster = ClusterConfig(scheduler="slurm", grace_seconds=60)
    rows = [{"seconds/step": seconds, "checkpoint/seconds": 12.0} for seconds in (200.0, 5.0)]
    assert grace_warning(cluster, rows) is None
    assert grace_warning(cluster, rows[:1]) is None


def test_the_last_step_is_committed_once_and_waited_for() -> None:
    assert commits(run(steps=4, every=2)) == ["commit 2", "commit 4 and wait"]


def test_a_resumed_job_does_the_steps_that_are_left() -> None:
    lines = run(steps=5, every=10, done=3)
    assert lines[0] == "begin 3"
    assert [line.split()[1] for line in lines if line.startswith("note")] == ["4", "5"]


def test_an_interruption_commits_exactly_the_steps_that_were_done() -> None:
    assert commits(run(steps=9, every=10, interrupt="step 3")) == ["commit 3 and wait"]


def test_a_step_counts_although_its_following_up_was_interrupted() -> None:
    lines = run(steps=9, every=10, interrupt="follow up 3")
    assert commits(lines) == ["commit 3 and wait"]
    assert "note 3 ['loss', 'seconds/step']" in lines


def test_an_interruption_right_after_a_commit_waits_until_it_is_durable() -> None:
    assert commits(run(steps=9, every=3, interrupt="step 3")) == ["commit 3", "commit 3 and wait"]


def test_a_commit_that_turns_out_to_have_failed_is_tried_again_on_the_way_out() -> None:
    diary = Failing()
    with pytest.raises(Interrupted):
        TrainLoop(diary, CheckpointCadence(3)).run(Counting(diary, 9, "step 3"), 0)
    assert commits(diary.lines) == ["commit 3", "commit 3 and wait", "commit 3 and wait"]


class Broken(Diary):
    """Commits fail with this error, and logging step 7 with that one."""

    def __init__(self, commit: Exception | None = None, note: Exception | None = None) -> None:
        super().__init__()
        self._commit, self._note = commit, note

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        super().save_checkpoint(job, done, wait)
        if self._commit:
            raise self._commit

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        if step == 7 and self._note:
            raise self._note


def test_an_error_that_is_none_of_ours_does_not_cost_the_steps_that_were_done() -> None:
    diary = Broken(note=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        TrainLoop(diary, CheckpointCadence(5)).run(Counting(diary, 9), 0)
    assert commits(diary.lines) == ["commit 5", "commit 7 and wait"]


@pytest.mark.parametrize("second", [CheckpointError("the disk was full"), TrainingError("a rank is lost"), OSError()])
def test_the_error_that_ended_a_job_is_told_although_its_last_commit_fails_too(
    second: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Broken(commit=second)
    with pytest.raises(WeightSyncError, match="step 3"):
        TrainLoop(diary, CheckpointCadence(10)).run(Counting(diary, 9, "step 3", WeightSyncError), 0)
    assert f"steps 1 to 3 are lost, their commit failed too: {second}" in caplog.text


@pytest.mark.parametrize(
    ("first", "second"), [(Interrupted, CheckpointError("the disk was full")), (WeightSyncError, SupersededError())]
)
def test_an_end_in_order_is_none_when_its_commit_fails_and_who_was_replaced_learns_it(
    first: type[RollcallError], second: RollcallError
) -> None:
    diary = Broken(commit=second)
    with pytest.raises(type(second)):
        TrainLoop(diary, CheckpointCadence(10)).run(Counting(diary, 9, "step 3", first), 0)


def test_nothing_is_committed_where_nothing_was_done() -> None:
    assert commits(run(steps=9, every=3, done=3, interrupt="step 3")) == []


def test_an_interruption_before_the_end_keeps_the_last_step() -> None:
    assert commits(run(steps=2, every=10, interrupt="end")) == ["commit 2 and wait"]


def test_what_is_done_is_committed_before_the_end_is_tried() -> None:
    lines = run(steps=3, every=10)
    assert lines[-1] == "commit 3 and wait"


def test_an_error_commits_what_was_done_while_the_model_is_intact() -> None:
    diary = Diary()
    with pytest.raises(WeightSyncError):
        TrainLoop(diary, CheckpointCadence(10)).run(Counting(diary, 9, "follow up 4", WeightSyncError), 0)
    assert commits(diary.lines) == ["commit 4 and wait"]


def test_an_error_commits_nothing_of_a_model_that_is_not_intact() -> None:
    diary = Diary()
    diary.is_checkpointable = False
    with pytest.raises(WeightSyncError):
        TrainLoop(diary, CheckpointCadence(10)).run(Counting(diary, 9, "follow up 4", WeightSyncError), 0)
    assert commits(diary.lines) == []


def test_an_error_commits_nothing_in_the_middle_of_a_step() -> None:
    diary = Diary()
    algorithm = Counting(diary, 9, "follow up 4", WeightSyncError)
    algorithm.is_checkpointable = False
    with pytest.raises(WeightSyncError):
        TrainLoop(diary, CheckpointCadence(10)).run(algorithm, 0)
    assert commits(diary.lines) == []


def test_the_loop_needs_no_torch() -> None:
    script = "import sys, pipeline.train.loop.train_loop; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "False\n"


def test_rates_are_of_the_whole_step() -> None:
    found = rates({"tokens/batch": 100.0, "seconds/data": 1.0}, 4.0, DeviceSpeed(processes=2))
    assert found == {
        "seconds/step": 4.0,
        "tokens_per_second": 25.0,
        "tokens_per_second_per_process": 12.5,
        "idle/trainer": 0.25,
    }


def test_utilisation_is_the_share_of_the_peak_that_the_model_takes() -> None:
    machine = DeviceSpeed(processes=4, peak=1e15)
    assert rates({"flops": 8e15}, 10.0, machine)["mfu"] == pytest.approx(0.2)
    assert "mfu" not in rates({"tokens/batch": 4e5}, 10.0, machine)
    assert "mfu" not in rates({"flops": 8e15}, 10.0, DeviceSpeed(processes=4))
    halved = rates({"tokens/batch": 4e5, "tokens/left_out": 2e5, "tokens/shared": 1e5}, 10.0, machine)
    assert halved["tokens_per_second"] == 2e4


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 0.0),
    ],
)
def test_a_device_is_known_by_its_name_or_has_no_peak(device: str, peak: float) -> None:
    assert peak_flops(device) == peak
