"""Watching a run of a cluster from elsewhere: its files say all but what the scheduler keeps for itself."""

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import ConfigError
from pipeline.observability.run_status import SILENT_SECONDS
from slurm.monitor.live_view import watch_run
from slurm.monitor.log_lines import LogLines
from slurm.monitor.run_snapshot import PastAttempt, Snapshot
from slurm.monitor.run_watcher import ASK_SECONDS, Watcher, read_snapshot
from slurm.monitor.status_panel import MAX_PAST, attempt_text, nothing_runs, render_run, silence_text, state_text
from slurm.scheduler.scheduler_protocol import JobQueue
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.run_directory import Decision, FakeAttempt, FakeRun
from tests.fakes.scheduler import FakeScheduler
from tests.fakes.terminal import shown

TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 2}
PREEMPTED = "stop requested (SIGTERM, agent.0): it resumes from its newest checkpoint"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(tmp_path / "demo", make_config(name="demo", training=TRAINING, cluster={"scheduler": "slurm"}))
    made.submit("1")
    return made


@pytest.fixture
def scheduler() -> FakeScheduler:
    made = FakeScheduler()
    made.submit("demo")
    return made


def an_attempt(run: FakeRun, name: str, steps: range) -> FakeAttempt:
    attempt = run.attempt(name)
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.train("rl", steps)
    return attempt


def preempted(run: FakeRun, name: str, steps: range, decision: Decision = "requeued") -> FakeAttempt:
    attempt = an_attempt(run, name, steps)
    attempt.tell("draining", "agent.0", "SIGTERM")
    attempt.all_roles("stopping", "stopped")
    attempt.conclude(decision, PREEMPTED)
    return attempt


def test_a_job_is_queued_until_its_first_attempt_exists(run: FakeRun) -> None:
    now = read_snapshot(run.root)
    assert (now.state, now.ended, now.attempt) == ("queued", False, "")
    assert nothing_runs(now) == "queued as job 1 …"
    assert attempt_text(now) == "job 1 · no attempt yet"
    run.attempt("1-0")
    assert read_snapshot(run.root).state == "meeting"


def test_a_run_that_is_submitted_again_is_queued_and_the_earlier_job_is_history(run: FakeRun) -> None:
    an_attempt(run, "1-0", range(1, 5)).fail("actor.0", 0)
    run.submit("2")
    now = read_snapshot(run.root)
    assert (now.state, now.attempt, now.failure) == ("queued", "", None)
    assert [(past.name, past.end) for past in now.past] == [("1-0", "failed")]


@pytest.mark.parametrize(
    ("decision", "live", "state"),
    [
        ("requeued", None, "queued"),
        ("requeued", True, "queued"),
        ("requeued", False, "interrupted"),
        ("left", None, "left"),
        ("left", True, "queued"),
        ("left", False, "interrupted"),
        ("stopped", None, "failed"),
        ("stopped", True, "failed"),
        ("finished", None, "finished"),
    ],
)
def test_what_the_outcome_and_the_scheduler_say_of_an_attempt_that_was_told_to_end(
    run: FakeRun, decision: Decision, live: bool | None, state: str
) -> None:
    preempted(run, "1-0", range(1, 5), decision)
    assert read_snapshot(run.root, live).state == state


@pytest.mark.parametrize(
    ("decision", "live", "state"),
    [
        (None, None, "stopping"),
        (None, True, "stopping"),
        (None, False, "failed"),
        ("requeued", None, "queued"),
        ("stopped", None, "failed"),
        ("left", False, "failed"),
    ],
)
def test_what_they_say_of_an_attempt_that_failed(
    run: FakeRun, decision: Decision | None, live: bool | None, state: str
) -> None:
    attempt = an_attempt(run, "1-0", range(1, 5))
    attempt.fail("actor.0", 0)
    if decision:
        attempt.conclude(decision, "actor.0 was killed")
    assert read_snapshot(run.root, live).state == state


def test_an_attempt_that_drains_is_stopping_until_its_outcome_is_known(run: FakeRun) -> None:
    attempt = an_attempt(run, "1-0", range(1, 5))
    attempt.tell("draining", "agent.0", "SIGTERM")
    attempt.all_roles("stopping", "stopped")
    assert read_snapshot(run.root).state == "stopping"


def test_the_attempt_is_shown_with_its_restart_and_those_before_it_with_their_ends(run: FakeRun) -> None:
    preempted(run, "1-0", range(1, 5))
    an_attempt(run, "1-1", range(5, 9)).tell("draining", "agent.0", "SIGTERM")
    an_attempt(run, "1-2", range(9, 12))
    now = read_snapshot(run.root)
    assert now.state == "training"
    assert now.job is not None
    assert (now.attempt, now.job.restart, now.job.most_restarts) == ("1-2", 2, 100)
    assert now.progress is not None
    assert now.progress.step == 11
    assert [(past.name, past.end, past.why) for past in now.past] == [
        ("1-0", "requeued", PREEMPTED),
        ("1-1", "cut off", ""),
    ]


def test_only_the_last_attempts_are_shown_and_the_others_counted(run: FakeRun) -> None:
    for restart in range(MAX_PAST + 3):
        preempted(run, f"1-{restart}", range(restart + 1, restart + 2))
    text = shown(read_snapshot(run.root))
    assert "3 earlier" in text
    assert "1-2 " not in text
    assert "1-3 " in text


def test_a_rank_without_signs_of_life_is_named_with_its_roles_and_the_state_stays(run: FakeRun) -> None:
    attempt = an_attempt(run, "1-0", range(1, 5))
    attempt.live(3, time.time() - 95)
    attempt.live(1, time.time())
    attempt.leave(2)
    now = read_snapshot(run.root)
    assert (now.state, list(now.silent)) == ("training", [1])
    assert silence_text(now) == "no sign of life from rank 1 (1:35): the node or its filesystem hangs"
    assert [role.name for role in now.roles if role.silent] == [role.name for role in now.roles if role.rank == 1]
    attempt.live(3, time.time() - SILENT_SECONDS + 5)
    assert read_snapshot(run.root).silent == {}


def test_nobody_expects_signs_of_life_from_an_attempt_that_is_over(run: FakeRun) -> None:
    preempted(run, "1-0", range(1, 5)).live(3, time.time() - 1000)
    assert read_snapshot(run.root).silent == {}


def test_the_scheduler_is_asked_only_in_doubt_and_not_at_every_look(run: FakeRun, scheduler: FakeScheduler) -> None:
    asked: list[float] = []
    clock = FakeClock()

    def find(_name: str) -> JobQueue:
        asked.append(clock.now())
        return scheduler

    watcher = Watcher(run.root, connect=find, clock=clock)
    scheduler.set("1", "PENDING", "Resources")
    assert nothing_runs(watcher.look()) == "queued as job 1: PENDING (Resources) …"
    watcher.look()
    assert len(asked) == 1
    clock.sleep(ASK_SECONDS)
    assert watcher.look().state == "queued"
    assert len(asked) == 2
    attempt = an_attempt(run, "1-0", range(1, 5))
    clock.sleep(ASK_SECONDS)
    assert watcher.look().state == "training"
    assert len(asked) == 2
    attempt.live(1, time.time() - 1000)
    scheduler.set("1", "NODE_FAIL")
    assert watcher.look().state == "interrupted"


@pytest.mark.parametrize("ending", ["CANCELLED", "forgotten", "another's"])
def test_a_job_that_is_gone_from_the_queue_is_interrupted(run: FakeRun, scheduler: FakeScheduler, ending: str) -> None:
    if ending == "another's":
        scheduler = FakeScheduler()
        scheduler.submit("somebody_elses")
    elif ending == "forgotten":
        scheduler.forget("1")
    else:
        scheduler.set("1", ending)
    assert Watcher(run.root, connect=lambda _: scheduler).look().state == "interrupted"


@pytest.mark.parametrize("word", ["CANCELLED", "NODE_FAIL", "TIMEOUT"])
def test_the_schedulers_word_for_the_end_is_told(run: FakeRun, scheduler: FakeScheduler, word: str) -> None:
    preempted(run, "1-0", range(1, 5), "left")
    scheduler.set("1", word)
    now = Watcher(run.root, connect=lambda _: scheduler).look()
    assert state_text(now) == f"interrupted ({word})"
    assert f"demo: interrupted ({word})" in LogLines().lines(now, 0.0)


def test_a_job_that_ended_in_the_queue_is_not_waited_for_in_words(run: FakeRun, scheduler: FakeScheduler) -> None:
    scheduler.set("1", "CANCELLED")
    now = Watcher(run.root, connect=lambda _: scheduler).look()
    assert (now.state, now.ended) == ("interrupted", True)
    assert nothing_runs(now) == "the job ended before its roles were started"


def test_a_scheduler_without_an_answer_is_told_of_once_in_lines_and_as_long_as_it_lasts_in_the_panel(
    run: FakeRun, scheduler: FakeScheduler
) -> None:
    clock, ticker = FakeClock(), LogLines()
    watcher = Watcher(run.root, connect=lambda _: scheduler, clock=clock)
    scheduler.fail("job", 2)
    told: list[str] = []
    troubles: list[str] = []
    for _ in range(3):
        now = watcher.look()
        told += [line for line in ticker.lines(now, clock.now()) if "no answer" in line]
        troubles.append(now.job.trouble if now.job else "")
        clock.sleep(ASK_SECONDS)
    silent = "job: Socket timed out on send/recv operation"
    assert troubles == [silent, silent, ""]
    assert told == [f"  no answer about job 1; the state is from files alone: {silent}"]


def test_a_slow_scheduler_is_left_in_peace_after_it_answered(run: FakeRun, scheduler: FakeScheduler) -> None:
    clock, asked = FakeClock(), []

    def slow(_name: str) -> JobQueue:
        asked.append(clock.now())
        clock.sleep(2 * ASK_SECONDS)
        return scheduler

    watcher = Watcher(run.root, connect=slow, clock=clock)
    watcher.look()
    watcher.look()
    assert len(asked) == 1


def test_a_job_that_stopped_without_a_failure_says_why(run: FakeRun) -> None:
    attempt = an_attempt(run, "1-0", range(1, 5))
    attempt.tell("draining", "agent.0", "SIGTERM")
    attempt.conclude("stopped", "rank 1 was lost")
    assert "demo: failed: rank 1 was lost" in LogLines().lines(read_snapshot(run.root), 0.0)


def test_green_is_only_what_shows_that_it_lives(run: FakeRun) -> None:
    attempt = an_attempt(run, "1-0", range(1, 5))
    attempt.live(3, time.time())
    assert green(read_snapshot(run.root)) > 0
    attempt.live(3, time.time() - 95)
    assert green(read_snapshot(run.root)) == 0


def green(what: Snapshot) -> int:
    """How many pieces of the picture are green."""
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system="standard")
    console.print(render_run(what))
    return console.file.getvalue().count("\x1b[32m")  # type: ignore[attr-defined, no-any-return]


def test_files_are_enough_where_the_scheduler_gives_no_answer(run: FakeRun, scheduler: FakeScheduler) -> None:
    scheduler.fail("job")
    assert Watcher(run.root, connect=lambda _: scheduler).look().state == "queued"

    def missing(_name: str) -> JobQueue:
        raise ConfigError("cluster.scheduler", "slurm", "Slurm's commands on PATH")

    assert Watcher(run.root, connect=missing).look().state == "queued"


def watched(run: FakeRun, moments: list[Callable[[], object]]) -> tuple[Snapshot, list[str]]:
    """What is told of a run to which these things happen, one before each look."""

    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            assert moments, "the run is over, and it is watched still"
            moments.pop(0)()

    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    last = watch_run(run.root, console, clock=Clock())
    return last, console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_watching_goes_on_over_requeues_and_ends_with_the_run(run: FakeRun) -> None:
    last, told = watched(
        run,
        [
            lambda: preempted(run, "1-0", range(1, 5)),
            lambda: an_attempt(run, "1-1", range(5, 9)).tell("draining", "agent.0", "SIGTERM"),
            lambda: preempted(run, "1-2", range(9, 12), "left"),
            lambda: an_attempt(run, "1-3", range(12, 61)),
            lambda: run.finish(60),
        ],
    )
    assert last.state == "finished"
    heads = [line for line in told if not line.startswith(" ")]
    assert heads == [
        "demo: queued: queued as job 1 …",
        "demo: queued: queued again as job 1 …",
        "demo: attempt 1-1 · restart 1 of 100",
        "demo: stopping",
        "demo: left: job 1 was ended by the scheduler, or queued again; rollcall runs shows which",
        "demo: attempt 1-3 · restart 3 of 100",
        "demo: training",
        "demo: finished",
    ]
    assert f"  attempt 1-0: requeued: {PREEMPTED}" in told
    assert "  attempt 1-1: cut off" in told


def test_watching_ends_with_a_job_that_stopped(run: FakeRun) -> None:
    def fail() -> None:
        attempt = an_attempt(run, "1-0", range(0))
        attempt.fail("actor.0", 0)
        attempt.conclude("stopped", "it failed before the first commit")

    last, told = watched(run, [fail])
    assert last.state == "failed"
    assert any("killed by SIGKILL" in line for line in told)


def test_lines_tell_of_silence_once_and_of_its_end(run: FakeRun) -> None:
    attempt, ticker = an_attempt(run, "1-0", range(1, 5)), LogLines()
    attempt.live(2, time.time())
    before = ticker.lines(read_snapshot(run.root), 0.0)
    assert not any("sign" in line for line in before)
    attempt.live(2, time.time() - 90)
    (line,) = ticker.lines(read_snapshot(run.root), 0.0)
    assert line.startswith("  no sign of life from ranks 0 (1:30), 1 (1:30)")
    assert ticker.lines(read_snapshot(run.root), 0.0) == []
    attempt.live(1, time.time())
    assert ticker.lines(read_snapshot(run.root), 0.0) == ["  rank 0 shows signs of life again"]


def test_each_attempt_tells_its_roles_anew(run: FakeRun) -> None:
    ticker = LogLines()
    preempted(run, "1-0", range(1, 5))
    ticker.lines(read_snapshot(run.root), 0.0)
    an_attempt(run, "1-1", range(5, 9))
    told = ticker.lines(read_snapshot(run.root), 0.0)
    assert [line for line in told if "trainer.0" in line] == ["  trainer.0 on rank 1: ready"]


def test_an_attempt_that_is_over_is_read_once(run: FakeRun) -> None:
    preempted(run, "1-0", range(1, 5))
    an_attempt(run, "1-1", range(5, 9))
    watcher = Watcher(run.root)
    before = watcher.look().past
    run.attempt("9-9").paths.root.rmdir()
    run.paths.attempt(run.identity.run_id, "1-0").outcome.unlink()
    assert (
        watcher.look().past
        == before
        == (PastAttempt("1-0", before[0].began, before[0].seconds, "requeued", PREEMPTED),)
    )
