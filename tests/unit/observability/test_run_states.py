"""How a run and its attempts stand, as the report and the terminal say."""

from typing import Literal

import pytest

from pipeline.observability.attempts_table import attempt_lines
from pipeline.observability.report_page import page, state
from pipeline.observability.run_history import read_history
from slurm.monitor.run_watcher import read_snapshot
from tests.fakes.run_directory import Decision, FakeRun


def test_attempts_are_in_the_order_in_which_they_began(run: FakeRun) -> None:
    for name in ("z-0", "a-0"):
        run.now += 10
        run.attempt(name).role("actor.0", 0, "starting")
    assert [attempt.name for attempt in read_history(run.root).attempts] == ["z-0", "a-0"]


def test_the_attempts_are_listed_with_what_they_trained_and_how_they_ended(finished: FakeRun) -> None:
    third = finished.attempt("9-0")
    third.conclude("stopped", "the job was requeued <too> often")
    finished.attempt("9-1")
    first, second, *others = attempt_lines(read_history(finished.root))
    assert first[0] == "local1-0"
    assert first[3:] == ("sft 1–20, rl 1–30", "interrupted", "SIGTERM (agent.0)")
    assert second[3:] == ("rl 31–60", "finished", "")
    assert [line[1:] for line in others if line[0] == "9-0"] == [
        ("—", "—", "—", "stopped", "the job was requeued <too> often")
    ]
    assert [line[1:] for line in others if line[0] == "9-1"] == [("—", "—", "—", "—", "")]
    text = page(read_history(finished.root))
    assert text.count("<td>local1-0</td>") == 1
    assert "requeued &lt;too&gt; often" in text


def test_a_run_with_one_attempt_needs_no_list_of_them(run: FakeRun) -> None:
    run.attempt("12-0")
    assert "<h2>Attempts</h2>" not in page(read_history(run.root))


def test_a_run_whose_failed_attempt_was_requeued_is_queued_and_the_list_tells_why(run: FakeRun) -> None:
    run.submit("12")
    attempt = run.attempt("12-0")
    attempt.fail("actor.0", 0)
    assert state(read_history(run.root)) == "stopping"
    attempt.conclude("requeued", "try 1 without a new commit")
    assert state(read_history(run.root)) == "queued"
    text = page(read_history(run.root))
    assert "actor.0 failed first" not in text
    assert "try 1 without a new commit" in text


def test_a_run_that_was_submitted_again_after_a_failure_is_queued(run: FakeRun) -> None:
    run.submit("12")
    attempt = run.attempt("12-0")
    attempt.fail("actor.0", 0)
    attempt.conclude("stopped", "it failed before the first commit")
    assert state(read_history(run.root)) == "failed"
    run.submit("13")
    assert state(read_history(run.root)) == "queued"
    assert "actor.0 failed first" not in page(read_history(run.root))


def test_a_job_that_stopped_after_a_lost_rank_failed_and_the_page_says_why(run: FakeRun) -> None:
    run.submit("12")
    attempt = run.attempt("12-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.tell("draining", "agent.0", "SIGTERM")
    attempt.conclude("stopped", "rank 1 was lost <often>")
    assert state(read_history(run.root)) == "failed"
    assert "rank 1 was lost &lt;often&gt;" in page(read_history(run.root))


@pytest.mark.parametrize("job", ["", "12", "13"])
@pytest.mark.parametrize("decision", [None, "requeued", "left", "stopped", "finished"])
@pytest.mark.parametrize("told", ["nothing", "draining", "failed", "finished"])
def test_the_report_and_the_terminal_say_the_same(run: FakeRun, job: str, decision: Decision | None, told: str) -> None:
    attempt = run.attempt("12-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    if job:
        run.submit(job)
    if told == "draining":
        attempt.tell("draining", "agent.0", "SIGTERM")
    if told == "failed":
        attempt.fail("actor.0", 0)
    if told == "finished":
        run.finish(60)
    if decision:
        attempt.conclude(decision, "so it was decided")
    with run.launched():
        assert state(read_history(run.root)) == read_snapshot(run.root).state


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_the_launcher_that_saw_a_job_end_without_a_trace_reports_no_run_under_way(
    run: FakeRun, kind: Literal["local", "slurm"]
) -> None:
    run.submit("12", kind)
    attempt = run.attempt("12-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    assert state(read_history(run.root)) == "starting", "files alone cannot tell"
    assert state(read_history(run.root, alive=False)) == "interrupted"
