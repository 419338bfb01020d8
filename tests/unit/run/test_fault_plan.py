"""The grammar of injected faults, and their records on disk."""

from pathlib import Path

import pytest

from pipeline.config.cross_checks import check_config
from pipeline.errors import ConfigError
from pipeline.run import fault_moments
from pipeline.run.fault_moments import FaultMoments, FaultRecords
from pipeline.run.fault_plan import GRAMMAR, TARGETS, Fault, parse_faults
from pipeline.run.paths import AttemptPaths
from slurm.submission.compose_config import compose_config


def test_a_fault_has_a_kind_a_target_and_a_moment() -> None:
    assert parse_faults(["kill:inference[2]@step=7", "stop: trainer @save", "exit:actor@2.5s"]) == (
        Fault("kill:inference[2]@step=7", "kill", "inference", 2, "step=7", None),
        Fault("stop:trainer@save", "stop", "trainer", 0, "save", None),
        Fault("exit:actor@2.5s", "exit", "actor", 0, "", 2.5),
    )
    assert [fault.step for fault in parse_faults(["kill:redis@step=12", "kill:redis@end"])] == [12, None]


def test_equal_faults_have_different_records() -> None:
    marks = [fault.mark for fault in parse_faults(["kill:redis@5s", "kill:redis@5s", "kill:redis@6s"])]
    assert len(set(marks)) == 3
    assert not any("/" in mark for mark in marks)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("kill:actor", "'kill:actor' is no KIND:TARGET@MOMENT"),
        ("murder:actor@save", "'murder' is no KIND"),
        ("exit:redis@save", "'redis' is no target of exit, which has trainer, actor, preprocessor"),
        ("kill:inference[x]@save", "'inference[x]' is no target of kill"),
        ("kill:actor@step=0", "'step=0' is no MOMENT"),
        ("kill:actor@noon", "'noon' is no MOMENT"),
        ("torn:checkpoint@start", "'start' is no moment of a checkpoint"),
    ],
)
def test_a_wrong_fault_is_refused_with_its_wrong_part_and_the_grammar(fault: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_config(["experiment=demo", f"faults=[kill:redis@5s, {fault}]"])
    assert f"in {fault!r}, {problem}" in str(refused.value)
    assert GRAMMAR in str(refused.value)


@pytest.mark.parametrize(
    ("fault", "override", "problem"),
    [
        ("kill:redis@5s", "streams.backend=files", "a target of this run, which has no redis"),
        ("kill:actor@5s", "training.steps=0", "a target of this run, which has no actor"),
        ("kill:trainer@sft", "training.sft.steps=0", "a moment of this run, which has no sft"),
        ("kill:trainer@step=9", "training.steps=8", "a step up to training.steps=8"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: str, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_config(compose_config(["experiment=demo", override, f"faults={fault}"]))


def test_faults_need_no_quotes_on_the_command_line() -> None:
    bare = "kill:inference[0]@step=7,stop:trainer@save"
    for text in (f"faults=[{bare}]", f"faults={bare}", f"+faults=[ {bare} ]"):
        assert compose_config(["experiment=demo", text]).faults == ("kill:inference[0]@step=7", "stop:trainer@save")
    assert all(compose_config(["experiment=demo", f"faults={kind}:{TARGETS[kind][0]}@9s"]).faults for kind in TARGETS)


@pytest.fixture
def paths(tmp_path: Path) -> AttemptPaths:
    return AttemptPaths(tmp_path, "r", "7-0")


def test_a_fault_is_claimed_once_also_by_a_later_attempt(paths: AttemptPaths) -> None:
    (fault,) = parse_faults(["kill:redis@5s"])
    records, later = FaultRecords(paths), FaultRecords(AttemptPaths(paths.run, "r", "7-1"))
    assert not records.has_begun(fault)
    assert records.begin(fault, 1.0)
    assert (records.begin(fault, 2.0), later.begin(fault, 2.0)) == (False, False)
    assert (later.has_begun(fault), later.is_done(fault)) == (True, False)
    records.finish(fault, 3.0)
    assert later.is_done(fault)


def test_the_trainer_waits_at_a_moment_until_its_faults_have_happened(paths: AttemptPaths) -> None:
    faults = parse_faults(["kill:redis@save", "kill:actor@save", "kill:actor@end"])
    records, rounds = FaultRecords(paths), list[int]()

    def agent() -> bool:
        assert records.has_reached("save")
        rounds.append(1)
        if len(rounds) <= 2:
            fault = faults[len(rounds) - 1]
            assert records.begin(fault, 1.0)
            records.finish(fault, 1.0)
        return False

    moments = FaultMoments(paths, faults, agent)
    moments.reach("update")
    moments.reach("save")
    assert len(rounds) == 2
    moments.reach("save")
    assert len(rounds) == 2, "a fault that has happened is not awaited again"


@pytest.mark.parametrize("ending", [True, False])
def test_the_trainer_waits_neither_in_an_ending_attempt_nor_forever(
    paths: AttemptPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: bool
) -> None:
    monkeypatch.setattr(fault_moments, "WAIT_SECONDS", 0.05)
    FaultMoments(paths, parse_faults(["kill:redis@save"]), lambda: ending).reach("save")
    assert ("waited 0.1 s for the faults at save: kill:redis@save" in caplog.text) != ending
