"""`slurm.monitor.live_view`: the same run in a terminal and in a pipe, at every moment of its life."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from pipeline.observability.run_status import BeforeStart, Ended, Running
from pipeline.roles.role_context import Status
from pipeline.run.metrics_log import FileStep, MetricSinks
from pipeline.utils import shared_files
from slurm.monitor.live_view import ANSWER_SECONDS, follow_run, main, watch_run
from slurm.monitor.log_lines import LINE_SECONDS, LogLines
from slurm.monitor.run_snapshot import Progress, RoleLine, Snapshot
from slurm.monitor.run_watcher import Watcher, read_snapshot
from slurm.monitor.status_panel import (
    COLORS,
    MAX_ROLES,
    figures_of,
    job_text,
    most_relevant,
    nothing_runs,
    sparkline,
    step_text,
)
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeAttempt, FakeRun
from tests.fakes.scheduler import FakeScheduler
from tests.fakes.terminal import shown


def role(number: int, state: str = "ready") -> RoleLine:
    return RoleLine(f"inference.{number}", number, "127.0.0.1", state, 1.0, "")


def test_the_state_follows_the_life_of_a_run(run: FakeRun) -> None:
    seen = [read_snapshot(run.root).state]
    attempt = run.attempt("local1-0")
    moments: list[Callable[[], object]] = [
        lambda: None,
        attempt.meet,
        lambda: attempt.all_roles("starting", "ready"),
        lambda: attempt.train("rl", range(1, 3)),
        lambda: attempt.tell("draining", "agent.0", "SIGTERM"),
        lambda: attempt.all_roles("stopping", "stopped"),
    ]
    for moment in moments:
        moment()
        seen.append(read_snapshot(run.root).state)
    assert seen == [
        "waiting", "meeting", "starting", "starting", "training", "stopping", "interrupted",
    ]  # fmt: skip


def test_a_finished_run_is_finished_and_a_failed_one_failed(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.tell("training_finished", "trainer.0")
    assert (read_snapshot(run.root).state, read_snapshot(run.root).ended) == ("finishing", False)
    run.finish(60)
    assert (read_snapshot(run.root).state, read_snapshot(run.root).ended) == ("finished", True)
    run.paths.finished.unlink()
    attempt.fail("actor.0", 0)
    assert (read_snapshot(run.root).state, read_snapshot(run.root).ended) == ("failed", True)


def test_the_numbers_are_those_of_the_last_step(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.train("rl", range(31), seconds=2.0, eval_every=15)
    now = read_snapshot(run.root)
    assert now.progress is not None
    assert (now.progress.job, now.progress.step, now.progress.steps) == ("rl", 30, 60)
    assert now.progress.seconds_left == pytest.approx(60.0)
    assert [step for step, _ in now.accuracies] == [0, 15, 30]
    assert len(now.rewards) == 30
    assert step_text(now.progress) == "30 / 60 · 1:00 left"
    assert [(name, value) for name, value, _ in figures_of(now)][1] == ("held-out", "0.200 → 0.436")
    assert now.max_lag == 2


def test_sft_before_rl_has_its_own_progress(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.train("sft", range(1, 11))
    now = read_snapshot(run.root)
    assert now.progress is not None
    assert (now.progress.job, now.progress.step, now.progress.steps) == ("sft", 10, 20)
    assert job_text(now.progress) == "SFT"


def test_sft_alone_shows_its_loss_and_nothing_of_what_is_sampled(tmp_path: Path) -> None:
    training = {"steps": 0, "prompts_per_step": 4, "sft": {"steps": 20}}
    run = FakeRun(tmp_path / "sft", make_config(name="sft", training=training))
    attempt = run.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.train("sft", range(1, 11))
    now = read_snapshot(run.root)
    assert [name for name, *_ in figures_of(now)] == ["loss", "grad norm", "tokens/s"]
    assert figures_of(now)[0][1] == f"{now.losses[-1]:.3f}"
    assert now.progress is not None
    assert job_text(now.progress) == "SFT"
    assert (now.progress.step, now.progress.steps) == (10, 20)


def test_the_jobs_of_files_show_the_one_that_trains(tmp_path: Path) -> None:
    training = {"steps": 0, "prompts_per_step": 4, "jobs": str(tmp_path / "queue")}
    run = FakeRun(tmp_path / "queue-run", make_config(name="queue-run", training=training))
    attempt = run.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    assert read_snapshot(run.root).progress is None
    with MetricSinks(run.paths.metrics, attempt.paths.attempt, clock=lambda: run.now) as sinks:
        for step in range(1, 8):
            run.now += 2.0
            file, done, of = ("1-sft", step, 3) if step <= 3 else ("2-rl", step - 3, 10)
            sinks.log("train", file[2:], step, {"loss": 1.0 / step}, FileStep(file, 7, done, of))
    with run.launched():
        now = read_snapshot(run.root)
    assert now.progress == Progress("rl", 4, 10, pytest.approx(12.0), "2-rl")
    assert len(now.losses) == 7
    assert job_text(now.progress) == "2-rl"
    assert figures_of(now)[0][:2] == ("loss", "0.143")


def test_a_new_attempt_is_shown_from_its_name_on_and_never_the_old_ones_failure(
    run: FakeRun, attempt: FakeAttempt
) -> None:
    attempt.fail("actor.0", 0)
    watcher = Watcher(run.root, "local2-0")
    assert watcher.look().state == "meeting"
    assert watcher.look().failure is None


def test_a_picture_can_be_drawn_of_nothing(tmp_path: Path) -> None:
    now = read_snapshot(tmp_path)
    assert now.state == "not submitted"
    assert nothing_runs(now) in shown(now).replace("\n", " ")


def test_a_run_whose_submission_was_refused_is_not_waited_for(
    left: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    left.paths.lock.touch()
    assert main([f"run={left.root}"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "left: not submitted: no job of this run was submitted; the command that made it (rollcall submit …) submits it"
    ]


def test_a_local_run_that_starts_again_is_not_interrupted_before_its_job_has_its_lock(run: FakeRun) -> None:
    run.paths.job_lock.touch()
    assert read_snapshot(run.root).state == "waiting"
    run.submit("local1", "local")
    run.attempt("local1-0").meet()
    assert read_snapshot(run.root).state == "starting"


def test_a_local_run_that_starts_again_after_a_failure_waits_for_its_new_attempt(
    run: FakeRun, attempt: FakeAttempt
) -> None:
    attempt.fail("actor.0", 0)
    run.submit("local2", "local")
    now = read_snapshot(run.root)
    assert (now.state, now.attempt, [past.end for past in now.past]) == ("waiting", "", ["failed"])


def test_a_local_job_that_was_gone_before_its_first_attempt_is_interrupted(left: FakeRun) -> None:
    left.submit("local1", "local")
    assert read_snapshot(left.root).state == "interrupted"


def test_a_local_run_whose_processes_are_gone_is_interrupted_whatever_it_did_last(left: FakeRun) -> None:
    attempt = left.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    now = read_snapshot(left.root)
    assert (now.state, now.ended) == ("interrupted", True)
    assert "● ready" not in shown(now), "nothing of it works any more"


def test_before_its_first_step_a_run_shows_how_many_there_will_be(run: FakeRun) -> None:
    now = read_snapshot(run.root)
    assert now.progress is None
    assert now.upcoming_phases is not None
    assert (now.upcoming_phases.step, now.upcoming_phases.steps) == (0, 20)


def test_the_columns_of_figures_stand_where_the_roles_end_and_do_not_drift(run: FakeRun, attempt: FakeAttempt) -> None:
    def column(what: Snapshot) -> int:
        return next(line for line in shown(what).splitlines() if "tokens/s" in line).index("idle:")

    attempt.train("rl", range(1, 3))
    before = column(read_snapshot(run.root))
    attempt.train("rl", range(3, 60), eval_every=5)
    assert column(read_snapshot(run.root)) == before


def test_every_state_has_a_colour() -> None:
    assert {*get_args(BeforeStart), *get_args(Running), *get_args(Ended)} <= set(COLORS)


def test_a_role_that_starts_shows_what_it_waits_for_and_not_the_report_of_an_earlier_process(
    run: FakeRun, attempt: FakeAttempt
) -> None:
    attempt.meet()
    attempt.all_roles("starting")
    for name, state in (("trainer.0", "starting"), ("actor.0", "ready")):
        status = Status(state=state, pid=1, time=1.0, detail="waits for a debugger")
        shared_files.write_document(attempt.paths.status(name), status)
    details = {role.name: role.detail for role in read_snapshot(run.root).roles}
    assert (details["trainer.0"], details["actor.0"]) == ("waits for a debugger", "")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_its_terminal(run: FakeRun, attempt: FakeAttempt, width: int) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.fail("actor.0", 0)
    assert max(len(line) for line in shown(read_snapshot(run.root), width).splitlines()) <= width


def test_many_roles_are_cut_to_those_that_are_not_ready() -> None:
    roles = [role(number) for number in range(200)]
    roles[150] = role(150, "starting")
    told = most_relevant(roles, MAX_ROLES)
    assert len(told) == MAX_ROLES
    assert roles[150] in told
    assert told == sorted(told, key=lambda line: line.rank)


def test_lines_have_no_control_codes_and_tell_each_thing_once(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.train("rl", range(1, 6))
    ticker, told = LogLines(), []
    for second in range(4):
        told += ticker.lines(read_snapshot(run.root), float(second))
    assert told[0] == "demo: training"
    assert sorted(told[1:-1]) == sorted(
        f"  {line.name} on rank {line.rank}: ready" for line in read_snapshot(run.root).roles
    )
    assert told[-1].startswith("  training 5 / 60")


def test_a_restart_in_place_and_a_fault_are_shown_and_leave_the_state_as_it_is(
    run: FakeRun, attempt: FakeAttempt
) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    ticker = LogLines()
    ticker.lines(read_snapshot(run.root), 0.0)
    reason = "killed by SIGKILL; restarted, 1 of recovery.actor=3"
    for state, detail in (("fault", "kill:actor@step=2"), ("restarting", reason), ("starting", ""), ("ready", "")):
        attempt.role("actor.0", 0, state, detail)  # type: ignore[arg-type]
    attempt.role("redis.0", 0, "fault", "stop:redis@end")  # type: ignore[arg-type]
    snapshot = read_snapshot(run.root)
    assert f"  actor.0 on rank 0: {reason}" in ticker.lines(snapshot, 1.0)
    assert ticker.lines(snapshot, 2.0) == []
    states = {line.name: (line.state, line.restarts) for line in snapshot.roles}
    assert (states["actor.0"], states["redis.0"]) == (("ready", (reason,)), ("ready", ()))
    assert "restarts in place: 1" in shown(snapshot)


def test_progress_is_told_every_few_seconds_but_an_evaluation_and_the_end_at_once(
    run: FakeRun, attempt: FakeAttempt
) -> None:
    ticker = LogLines()
    attempt.train("rl", range(1, 3))
    assert len(ticker.lines(read_snapshot(run.root), 0.0)) == 2
    attempt.train("rl", range(3, 5))
    assert ticker.lines(read_snapshot(run.root), 1.0) == []
    attempt.train("rl", range(5, 6), eval_every=5)
    assert "held-out" in ticker.lines(read_snapshot(run.root), 2.0)[0]
    attempt.train("rl", range(6, 8))
    assert len(ticker.lines(read_snapshot(run.root), 2.0 + LINE_SECONDS)) == 1
    attempt.train("rl", range(8, 9))
    assert "8 / 60" in ticker.lines(read_snapshot(run.root), 3.0 + LINE_SECONDS, last=True)[0]


def test_following_ends_when_the_caller_says_so_and_shows_the_last_moment(run: FakeRun, attempt: FakeAttempt) -> None:
    clock, console = FakeClock(), Console(file=io.StringIO(), width=100, force_terminal=False)

    def until() -> bool:
        if len(clock.slept) == 3:
            attempt.train("rl", range(1, 3))
        return len(clock.slept) >= 3

    last = follow_run(run.root, until, console=console, clock=clock)
    assert last.progress is not None
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "training 2 / 60" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("failing", [[0], [2], [2, 3]], ids=["first", "later", "until the end"])
def test_a_disk_that_fails_for_a_moment_does_not_end_the_following(
    failing: list[int], run: FakeRun, attempt: FakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks, console = FakeClock(), list[int](), Console(file=io.StringIO(), force_terminal=False)
    attempt.train("rl", range(1, 3))
    look = Watcher.look

    def failed(watcher: Watcher, live: bool | None = None) -> Snapshot:
        looks.append(len(looks))
        if looks[-1] in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(watcher, live)

    monkeypatch.setattr(Watcher, "look", failed)
    last = follow_run(run.root, lambda: len(looks) >= 3, console=console, clock=clock)
    assert last.progress is not None
    assert last.progress.step == 2


def test_a_disk_that_refuses_for_good_ends_the_following(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = FakeClock(), list[int]()
    look = Watcher.look

    def refused(watcher: Watcher, live: bool | None = None) -> Snapshot:
        looks.append(len(looks))
        if looks[-1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return look(watcher, live)

    monkeypatch.setattr(Watcher, "look", refused)
    with pytest.raises(PermissionError):
        follow_run(run.root, lambda: len(looks) > 5, console=Console(file=io.StringIO()), clock=clock)


def test_a_terminal_gets_one_picture_that_is_drawn_over(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    clock = FakeClock()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    follow_run(run.root, lambda: len(clock.slept) >= 2, console=console, clock=clock)
    assert "\x1b[2K" in console.file.getvalue()  # type: ignore[attr-defined]


def test_watching_ends_by_itself_when_the_run_ended(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.fail("actor.0", 0)
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    assert watch_run(run.root, console).state == "failed"
    assert "killed by SIGKILL" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_watch_commands_exit_code_says_how_the_run_ended(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.fail("actor.0", 0)
    assert main([f"run={run.root}"]) == 1
    run.finish(60)
    assert main([f"run={run.root}"]) == 0
    assert main(["run=/nowhere"]) == 2


def test_the_picture_waits_only_shortly_for_a_scheduler(left: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, deadlines = FakeScheduler(), list[float]()

    def connect(name: str, seconds: float) -> FakeScheduler:
        assert name == "slurm"
        deadlines.append(seconds)
        return scheduler

    monkeypatch.setattr("slurm.monitor.live_view.connect_scheduler", connect)
    left.submit("1")
    assert main([f"run={left.root}"]) == 130, "the scheduler knows no such job"
    assert deadlines == [ANSWER_SECONDS]


def test_looking_writes_nothing(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    before = {file: file.stat().st_mtime_ns for file in run.root.rglob("*")}
    read_snapshot(run.root)
    assert {file: file.stat().st_mtime_ns for file in run.root.rglob("*")} == before


def test_a_sparkline_rises_with_its_values_and_is_no_wider_than_asked() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([1.0, 1.0, 1.0]) == "▁▁▁"
    assert sparkline([1.0]) == ""
    assert len(sparkline([float(value) for value in range(1000)], width=40)) == 40
