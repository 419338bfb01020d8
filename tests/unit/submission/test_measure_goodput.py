"""The arguments of launchers/goodput.py, and the times of its preemptions."""

from pathlib import Path

import pytest

from pipeline.config import ClusterConfig
from pipeline.config.cross_checks import check_queue_keys
from pipeline.errors import ConfigError
from pipeline.run.fault_plan import parse_faults
from pipeline.run.paths import RunPaths
from slurm.submission.compose_config import compose_config
from slurm.submission.measure_goodput import Preemption, read_arguments


def test_faults_get_the_period_as_their_moment_and_enough_restarts() -> None:
    disturbance, overrides = read_arguments(
        ["experiment=demo", "faults=[kill:inference[1], kill:trainer]", "every=30s"]
    )
    assert overrides == ["experiment=demo"]
    config = compose_config([*overrides, *disturbance.overrides(ClusterConfig(scheduler="local"))])
    check_queue_keys(config)
    assert [(fault.target, fault.index, fault.period) for fault in parse_faults(config.faults)] == [
        ("inference", 1, 30.0),
        ("trainer", 0, 30.0),
    ]
    assert (config.recovery.inference, config.recovery.trainer, config.recovery.actor) == (1000, 1000, 3)
    assert not disturbance.requeues


def test_a_requeue_is_no_fault_of_a_role() -> None:
    disturbance, overrides = read_arguments(["experiment=demo", "faults=requeue"])
    assert (disturbance.requeues, disturbance.every) == (True, 120)
    config = compose_config([*overrides, "cluster=slurm", *disturbance.overrides(ClusterConfig(scheduler="slurm"))])
    assert (config.faults, config.cluster.max_restarts) == ((), 1000)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [("faults=", "KIND:TARGET"), ("faults=kill:trainer@9s", "without a moment"), ("every=2m", "whole seconds")],
)
def test_wrong_arguments_are_refused(argument: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_arguments(["faults=requeue", argument])


def test_a_job_is_preempted_at_the_period_but_not_before_it_has_trained_a_step() -> None:
    preemption = Preemption(RunPaths(Path("r")), every=120, steps=50)

    def due(step: int, time: float, now: float) -> bool:
        return preemption.is_due({"step": step, "time": time}, now)

    assert [due(1, 100, 101), due(9, 215, 219), due(9, 215, 220)] == [False, False, True]
    preemption.struck(220)
    assert not due(9, 215, 400), "no step since the last preemption"
    assert due(10, 401, 402), "late, since the start took longer than the period"
    assert not due(50, 500, 900), "the run is at its end"
