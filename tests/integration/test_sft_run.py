"""SFT alone: a run whose plan has trainers only, on two nodes, interrupted and resumed."""

import signal
from typing import Any

import pytest

from pipeline.run.events import Events
from pipeline.run.metrics_log import read_rows
from tests.support.runs.launched import Launched, Launches

# The suite has a sweep of such runs on Slurm, one of them preempted: tests/cluster/test_sweep.py.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.trial]
STEPS = 100
SFT = (
    "training.steps=0",
    f"training.sft.steps={STEPS}",
    "training.sft.batch=8",
    "training.checkpoint_every=1000",
    "resources.trainer.nodes=2",
    "resources.trainer.processes=1",
)


def steps_of(launched: Launched) -> list[int]:
    return [row["step"] for row in rows_of(launched)]


def rows_of(launched: Launched) -> list[dict[str, Any]]:
    return [row for row in read_rows(launched.run.metrics) if (row["kind"], row["job"]) == ("train", "sft")]


def test_sft_alone_runs_on_trainers_only_and_goes_on_where_it_was_interrupted(launches: Launches) -> None:
    first = launches.submit("sft", *SFT)
    first.wait("a step", lambda: bool(steps_of(first)), 120)
    first.interrupt(signal.SIGTERM)
    assert first.end() == 143, first.output()
    first.assert_nothing_left()
    done = steps_of(first)
    assert done == list(range(1, len(done) + 1))
    assert 0 < len(done) < STEPS
    assert list(first.run.checkpoints.glob(f"sft-{len(done)}/*/COMPLETE"))

    second = launches.submit("sft", *SFT)
    second.wait("the end", second.run.finished.exists, 120)
    assert second.end() == 0, second.output()
    assert steps_of(second) == list(range(1, STEPS + 1))
    assert f"finished {STEPS} steps" in second.output()
    assert {name for name, _ in second.history()} == {"trainer.0", "trainer.1"}
    assert list(second.run.model.glob("*.safetensors"))
    assert second.run.report.exists()
    second.assert_nothing_left()


def test_ctrl_c_loses_no_step_that_takes_longer_than_the_grace(launches: Launches) -> None:
    longer = ("training.sft.batch=12000", "cluster.grace_seconds=0.5", "cluster.stop_seconds=0.5")
    run = launches.submit("slow", *SFT, *longer)
    run.wait("a step", lambda: bool(steps_of(run)), 300)
    run.interrupt(signal.SIGINT)
    assert run.end(300) == 130, run.output()
    first, *_, last = rows_of(run)
    assert last["step"] > first["step"], "the step under way was waited for"
    assert last["seconds/step"] > 1.5, "this machine is too fast for this test: it proves nothing"
    assert list(run.run.checkpoints.glob(f"sft-{last['step']}/*/COMPLETE"))
    assert "SIGINT: waiting for the trainer to end its step and save a checkpoint" in run.output()
    draining = Events(run.attempts[0]).get("draining")
    assert draining is not None
    assert draining.why == "interrupted by Ctrl-C (SIGINT) at the launcher"
