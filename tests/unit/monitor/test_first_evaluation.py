"""The first evaluation, while training waits for it."""

from pipeline.roles.role_context import Status
from pipeline.transport.eval_records import ASKED, EVALUATED
from pipeline.utils import shared_files
from slurm.monitor.log_lines import LINE_SECONDS, LogLines
from slurm.monitor.run_watcher import read_snapshot
from tests.fakes.run_directory import FakeAttempt, FakeRun
from tests.fakes.terminal import shown


def evaluates(attempt: FakeAttempt, done: int) -> None:
    """The actor reports how far an evaluation is, as it does."""
    detail, numbers = f"evaluating held_out: {done} of 32 prompts", {EVALUATED: float(done), ASKED: 32.0}
    status = Status(state="ready", pid=1, time=attempt.run.now, detail=detail, numbers=numbers)
    shared_files.write_document(attempt.paths.status("actor.0"), status)


def test_the_first_evaluation_is_named_with_its_progress_while_training_waits_for_it(
    run: FakeRun, attempt: FakeAttempt
) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    ticker = LogLines()
    ticker.lines(read_snapshot(run.root), 0.0)
    evaluates(attempt, 3)
    now = read_snapshot(run.root)
    assert now.state == "evaluating"
    assert ticker.lines(now, 1.0) == [
        "demo: evaluating",
        "  first evaluation: evaluating held_out, 3 / 32 prompts",
    ]
    panel = shown(now)
    assert "first evaluation: evaluating held_out, 3 / 32 prompts" in panel
    evaluates(attempt, 5)
    assert ticker.lines(read_snapshot(run.root), 2.0) == [], "not more often than other progress"
    assert len(ticker.lines(read_snapshot(run.root), 1.0 + LINE_SECONDS)) == 1
    attempt.train("rl", range(1, 3))
    now = read_snapshot(run.root)
    assert now.state == "training"
    assert not any("evaluat" in line for line in ticker.lines(now, 100.0)), "later ones run beside training"
    assert "evaluating held_out, 5 / 32 prompts" in shown(now)


def test_the_first_evaluation_after_sft_is_named_too(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.train("sft", range(1, 21))
    evaluates(attempt, 3)
    lines = LogLines().lines(read_snapshot(run.root), 0.0)
    assert "  first evaluation: evaluating held_out, 3 / 32 prompts" in lines
