"""The goodput of a run directory, as the real writers leave it."""

from pathlib import Path

import pytest

from pipeline.run.goodput_records import read_goodput, read_steps
from pipeline.run.metrics_log import MetricSinks, roll_back
from tests.fakes.run_directory import BEGAN, FakeAttempt, FakeRun


def train(attempt: FakeAttempt, done: int, *times: float) -> None:
    """A trainer restores step `done` and logs steps at these seconds since the begin."""
    run = attempt.run
    roll_back(run.paths.metrics, "rl", done, aside=attempt.paths.dropped(0))
    begin = {"start/restore_seconds": 2.0, "start/begin_seconds": 3.0}
    with MetricSinks(run.paths.metrics, attempt.paths.attempt, clock=lambda: run.now) as sinks:
        for step, time in enumerate(times, start=done + 1):
            run.now = BEGAN + time
            sinks.log("train", "rl", step, {"seconds/step": 5.0, "seconds/data": 1.0} | begin)
            begin = {}
            sinks.log("eval", "rl", step, {"eval/accuracy": 0.5})


def test_the_records_of_two_attempts_give_the_goodput(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "r")
    first = run.attempt("7-0")
    first.role("trainer.0", 0, "starting")
    train(first, 0, 20, 25, 30)
    run.now = BEGAN + 31
    first.tell("failed", "agent.1", "its node is lost")
    first.role("trainer.0", 0, "stopped")
    second = run.attempt("7-1")
    run.now = BEGAN + 40
    second.role("trainer.0", 0, "starting")
    train(second, 1, 60, 65)
    assert sorted((step.time - BEGAN, step.dropped) for step in read_steps(run.paths)) == [
        *((20, False), (25, True), (30, True)),
        *((60, False), (65, False)),
    ]
    measured = read_goodput(run.root)
    assert measured is not None
    assert (measured.wall, measured.restarts) == (65, 1)
    assert measured.useful == 4 + 4 + 5
    (outage,) = measured.outages
    assert outage.what == "failed: its node is lost (agent.1)"
    lost = {cause: round(seconds, 3) for cause, seconds in outage.seconds.items()}
    assert lost == {"requeue": 9, "trainer": 10, "restore": 2, "weights": 3, "batch": 1, "retrained": 11}
    assert measured.metrics()["goodput/ratio"] == pytest.approx(13 / 65)


def test_damaged_and_missing_records_never_raise(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "r")
    assert read_goodput(run.root) is None
    attempt = run.attempt("7-0")
    assert read_goodput(run.root) is None
    attempt.role("trainer.0", 0, "starting")
    with attempt.paths.timeline_of(0).open("ab") as timeline:
        timeline.write(b'{"time": 3')
    nodes = attempt.paths.rendezvous / "nodes"
    nodes.mkdir(parents=True)
    (nodes / "0.json").write_bytes(b"torn")
    run.paths.metrics.write_bytes(b"no json\n")
    measured = read_goodput(run.root, until=BEGAN + 5)
    assert measured is not None
    assert (measured.wall, measured.useful) == (5, 0)
