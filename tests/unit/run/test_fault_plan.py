"""The grammar of injected faults, and their records on disk."""

from pathlib import Path

import pytest

from pipeline.config.cross_checks import check_config
from pipeline.errors import ConfigError
from pipeline.run import fault_conditions, fault_moments
from pipeline.run.fault_moments import FaultMoments, FaultRecords
from pipeline.run.fault_plan import GRAMMAR, TARGETS, Fault, parse_faults
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.disk_faults import FileOperation, Rule
from tests.fakes.composed_config import compose_cached


def test_a_fault_has_a_kind_a_target_and_a_moment() -> None:
    assert parse_faults(["kill:inference[2]@step=7", "stop: trainer @save", "exit:actor@2.5s"]) == (
        Fault("kill:inference[2]@step=7", "kill", "inference", 2, "step", 7),
        Fault("stop:trainer@save", "stop", "trainer", 0, "save"),
        Fault("exit:actor@2.5s", "exit", "actor", 0, "", seconds=2.5),
    )
    assert [fault.period for fault in parse_faults(["kill:redis@every=30s", "kill:redis@30s"])] == [30.0, None]


@pytest.mark.parametrize(
    ("fault", "moment", "number", "belongs"),
    [
        ("kill:redis@save", "save", 5, True),
        ("kill:redis@save=5", "save", 5, True),
        ("kill:redis@save=5", "save", 10, False),
        ("kill:redis@eval=0", "eval", 0, True),
        ("kill:redis@eval=5", "update", 5, False),
        ("kill:redis@end", "end", None, True),
        ("kill:redis@5s", "end", None, False),
    ],
)
def test_a_fault_belongs_to_the_first_of_its_moments_or_to_that_of_its_step(
    fault: str, moment: str, number: int | None, belongs: bool
) -> None:
    assert parse_faults([fault])[0].is_of(moment, number) == belongs


def test_a_fault_of_the_disk_has_seconds() -> None:
    full, slow, ever = parse_faults(["full:disk=30s@save", "slow:filesystem=0.5s@start", "full:disk@step=3"])
    assert [(fault.target, fault.amount, fault.index) for fault in (full, slow, ever)] == [
        ("disk", 30.0, 0),
        ("filesystem", 0.5, 0),
        ("disk", None, 0),
    ]


def test_a_partition_names_a_rank_and_late_names_have_no_moment() -> None:
    cut, ever, late = parse_faults(["partition:node[2]=20s@12s", "partition:node@step=3", "late:names=60s"])
    assert (cut.target, cut.index, cut.amount, cut.seconds) == ("node", 2, 20.0, 12.0)
    assert (ever.index, ever.amount, ever.number) == (0, None, 3)
    assert (late.target, late.amount, late.moment, late.seconds, late.period) == ("names", 60.0, "", None, None)
    assert not late.is_of("start", None)


@pytest.mark.parametrize(
    ("rank", "other", "lost"), [(0, 1, True), (1, 0, True), (0, 2, False), (1, 1, False), (1, None, False)]
)
def test_a_partition_is_crossed_between_its_node_and_every_other(rank: int, other: int | None, lost: bool) -> None:
    assert fault_conditions.crosses(rank, other, 1) == lost


def test_a_fault_of_the_disk_begins_in_every_process_once_its_agent_begins_it_and_ends_by_itself(
    paths: AttemptPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = parse_faults(["full:disk=30s@save"])
    rules: list[Rule] = []
    monkeypatch.setattr(fault_conditions, "inject", rules.append)
    fault_conditions.apply_file_faults(paths, [fault, *parse_faults(["kill:redis@5s"])], rank=0)
    (rule,) = rules
    write = FileOperation("open", paths.run / "metrics.jsonl", takes_room=True)
    rule(write)
    paths.root.mkdir(parents=True)
    fault_conditions.begin_condition(paths, fault)
    with pytest.raises(OSError, match="No space left on device"):
        rule(write)
    rule(FileOperation("open", RunPaths(paths.run).faults / "record", takes_room=True))
    rule(FileOperation("open", paths.run.parent / "elsewhere", takes_room=True))
    monkeypatch.setattr(fault_conditions.time, "time", lambda: (paths.conditions / fault.mark).stat().st_mtime + 31)
    rule(write)


def test_equal_faults_have_different_records() -> None:
    marks = [fault.mark for fault in parse_faults(["kill:redis@5s", "kill:redis@5s", "kill:redis@6s"])]
    assert len(set(marks)) == 3
    assert not any("/" in mark for mark in marks)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("kill:actor", "'kill:actor' is no KIND:TARGET@MOMENT"),
        ("murder:actor@save", "'murder' is no KIND"),
        ("exit:checkpoint@save", "'checkpoint' is no target of exit, which has redis, trainer, inference, actor"),
        ("kill:actor@step", "'step' is no MOMENT"),
        ("kill:actor@end=3", "'end=3' is no MOMENT"),
        ("kill:inference[x]@save", "'inference[x]' is no target of kill"),
        ("kill:actor@noon", "'noon' is no MOMENT"),
        ("kill:actor@every=0s", "'every=0s' is no MOMENT"),
        ("torn:checkpoint@start", "'start' is no moment of a checkpoint"),
        ("slow:filesystem@5s", "'filesystem' has no seconds"),
        ("kill:actor=3s@5s", "'actor=3s' is no target with seconds"),
        ("full:filesystem@5s", "'filesystem' is no target of full, which has disk"),
        ("full:disk[1]@5s", "'disk[1]' is no target with an index"),
        ("partition:node[1]=20s", "'partition:node[1]=20s' is no KIND:TARGET@MOMENT"),
        ("partition:trainer@5s", "'trainer' is no target of partition, which has node"),
        ("late:names", "'names' has no seconds"),
        ("late:names=5s@start", "'@start' is too much: late lasts as long as the run"),
    ],
)
def test_a_wrong_fault_is_refused_with_its_wrong_part_and_the_grammar(fault: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_cached(["experiment=demo", f"faults=[kill:redis@5s, {fault}]"])
    assert f"in {fault!r}, {problem}" in str(refused.value)
    assert GRAMMAR in str(refused.value)


@pytest.mark.parametrize(
    ("fault", "override", "problem"),
    [
        ("kill:redis@5s", "streams.backend=files", "a target of this run, which has no redis"),
        ("kill:actor@5s", "training.steps=0", "a target of this run, which has no actor"),
        ("kill:trainer@sft", "training.sft.steps=0", "a moment of this run, which has no sft"),
        ("kill:trainer@step=9", "training.steps=8", "a step up to training.steps=8"),
        ("kill:trainer@sft=9", "training.sft.steps=8", "a step up to training.sft.steps=8"),
        ("late:names=91s", "cluster.scheduler=slurm", "at most cluster.fs_visibility_seconds=90, by which agents wait"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: str, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_config(compose_cached(["experiment=demo", override, f"faults={fault}"]))


def test_faults_need_no_quotes_on_the_command_line() -> None:
    bare = "kill:inference[0]@step=7,stop:trainer@save"
    for text in (f"faults=[{bare}]", f"faults={bare}", f"+faults=[ {bare} ]"):
        assert compose_cached(["experiment=demo", text]).faults == ("kill:inference[0]@step=7", "stop:trainer@save")
    ends = {"slow": "=2s@9s", "late": "=2s", "partition": "[1]=2s@9s"}
    texts = [f"{kind}:{targets[0]}{ends.get(kind, '@9s')}" for kind, targets in TARGETS.items()]
    assert all(compose_cached(["experiment=demo", f"faults={text}"]).faults == (text,) for text in texts)


@pytest.fixture
def paths(tmp_path: Path) -> AttemptPaths:
    return AttemptPaths(tmp_path, "r", "7-0")


def test_each_time_of_a_fault_with_a_period_has_a_record(paths: AttemptPaths) -> None:
    (fault,) = parse_faults(["kill:redis@every=5s"])
    records, later = FaultRecords(paths), FaultRecords(AttemptPaths(paths.run, "r", "7-1"))
    strikes = [writer.begin_next(fault, 1.0) for writer in (records, records, later)]
    assert [strike.repetition for strike in strikes] == [0, 1, 2]
    assert {strike.text for strike in strikes} == {fault.text}
    assert len({strike.mark for strike in strikes}) == 3
    assert all(later.has_begun(strike) for strike in strikes)


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
    faults = parse_faults(["kill:trainer@save", "kill:redis@save", "kill:actor@save", "kill:actor@save=7"])
    records, order = FaultRecords(paths), list[str]()

    def agent() -> bool:
        fault = next(fault for fault in faults if records.has_reached(fault) and not records.has_begun(fault))
        assert records.begin(fault, 1.0)
        records.finish(fault, 1.0)
        order.append(fault.text)
        return False

    moments = FaultMoments(paths, faults, agent)
    moments.reach("update", 5)
    assert order == []
    moments.reach("save", 5)
    assert order == ["kill:redis@save", "kill:actor@save", "kill:trainer@save"], "the trainer's own fault is the last"
    moments.reach("save", 6)
    assert len(order) == 3, "a fault that has happened is not awaited again"
    moments.reach("save", 7)
    assert order[3:] == ["kill:actor@save=7"]


@pytest.mark.parametrize("ending", [True, False])
def test_the_trainer_waits_neither_in_an_ending_attempt_nor_forever(
    paths: AttemptPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: bool
) -> None:
    monkeypatch.setattr(fault_moments, "WAIT_SECONDS", 0.05)
    FaultMoments(paths, parse_faults(["kill:redis@save"]), lambda: ending).reach("save", 5)
    assert ("waited 0.1 s for faults to happen: kill:redis@save" in caplog.text) != ending
