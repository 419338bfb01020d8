"""Names that appear late for a client of the shared filesystem: whatever looks for them, the outcome is the same."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.trainer_state import TrainerState
from pipeline.run.events import EventName
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import FIRST_FAILURE
from pipeline.topology.plan import make_plan
from slurm.agent.agent_heartbeat import unexited_ranks
from slurm.agent.role_lifecycle import End, shutdown_reason
from slurm.batch import attempt_summary
from slurm.batch.requeue import conclude_attempt
from slurm.scheduler.scheduler_protocol import RUNNING
from tests.fakes.agents import RANKS, Cluster, make_cluster
from tests.fakes.configs import make_config
from tests.fakes.disk import Faults, View
from tests.fakes.ranks import Simulation, make_node_infos
from tests.fakes.scheduler import FakeScheduler

LATE = 60.0
ONE_LATE = [{rank: LATE} for rank in range(RANKS)]
LAGS: list[Mapping[int, float]] = [{}, *ONE_LATE, dict.fromkeys(range(RANKS), LATE), dict.fromkeys(range(RANKS), 7.0)]

every_lag = pytest.mark.parametrize("lags", LAGS, ids=lambda lags: "-".join(f"{r}:{s:g}" for r, s in lags.items()))


def first_failure(cluster: Cluster) -> FirstFailure | None:
    return View(cluster.disk, 99).read(FIRST_FAILURE, FirstFailure)


@every_lag
@pytest.mark.parametrize("leader", [0, 4])
def test_a_run_that_finished_is_finished_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lags: Mapping[int, float], leader: int
) -> None:
    cluster = make_cluster(tmp_path, lags, trained=30.0, leader=leader)
    assert cluster.start(monkeypatch) == ["finished"] * RANKS
    assert first_failure(cluster) is None
    assert cluster.run.paths.finished.exists()


@every_lag
def test_a_trainer_that_needed_all_its_time_to_become_ready_is_ready_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lags: Mapping[int, float]
) -> None:
    last = make_config(cluster={"scheduler": "slurm"}).cluster.startup_seconds - 1.0
    cluster = make_cluster(tmp_path, lags, ready_at=last, trained=last + 2 * LATE)
    assert cluster.start(monkeypatch) == ["finished"] * RANKS
    assert first_failure(cluster) is None


@every_lag
def test_a_run_that_is_told_to_end_commits_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lags: Mapping[int, float]
) -> None:
    cluster = make_cluster(tmp_path, lags, signals=dict.fromkeys(range(RANKS), 30.0))
    assert cluster.start(monkeypatch) == ["preempted"] * RANKS
    assert cluster.committed
    assert first_failure(cluster) is None


@every_lag
def test_the_first_failure_is_named_and_nobody_is_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lags: Mapping[int, float]
) -> None:
    cluster = make_cluster(tmp_path, lags, dies=("inference.0", 30.0))
    cluster.start(monkeypatch)
    failure = first_failure(cluster)
    assert failure is not None
    assert failure.role == "inference.0"
    assert unexited_ranks(View(cluster.disk, 99), RANKS) == ()
    assert cluster.cut_off == set()


def test_marks_that_are_seen_at_once_cost_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(tmp_path, {}, trained=30.0)
    cluster.start(monkeypatch)
    assert cluster.time < 40.0


def test_an_actor_that_ends_well_though_nothing_ended_fails_before_names_can_be_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(tmp_path, {}, dies=("actor.0", 30.0))
    rule = cluster.rule
    monkeypatch.setattr(cluster, "rule", lambda name: 0 if rule(name) == -9 else rule(name))
    cluster.start(monkeypatch)
    failure = first_failure(cluster)
    assert failure is not None
    assert (failure.role, failure.cause) == ("actor.0", "exited with code 0")
    assert cluster.time < 30.0 + make_config(cluster={"scheduler": "slurm"}).cluster.lateness


def test_while_it_trains_a_node_looks_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(tmp_path, {}, trained=100.0, ranks=512)
    done: list[tuple[float, int, str]] = []
    operate = View._operate

    def note(view: View, kind: str) -> None:
        done.append((cluster.time, cluster.views.index(view), kind))
        operate(view, kind)

    monkeypatch.setattr(View, "_operate", note)
    cluster.start(monkeypatch)
    meanwhile = [(rank, kind) for time, rank, kind in done if 20.0 <= time < 80.0]
    looks = Counter(rank for rank, _ in meanwhile)
    assert {kind for _, kind in meanwhile} == {"list"}
    assert max(looks[rank] for rank in (0, 2, 3, 4)) <= 60
    assert 511 * looks[0] + looks[1] <= 512 * 60, "the controller of the trainer looks, besides its node's agent"


@pytest.mark.parametrize("late", [0.0, LATE])
@pytest.mark.parametrize(("dies", "trained"), [("actor.0", False), ("trainer.0", False), ("actor.0", True)])
def test_what_becomes_of_the_job_does_not_hang_on_when_its_batch_script_sees_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float, dies: str, trained: bool
) -> None:
    cluster = make_cluster(tmp_path, {9: late}, dies=(dies, 30.0))
    if trained:
        complete_checkpoint(Storage(str(cluster.run.paths.checkpoints)), TrainerState(job="rl", step=1), "7-9", {}, 1)
    cluster.start(monkeypatch)
    monkeypatch.setattr(attempt_summary, "FileSharedDir", lambda root: View(cluster.disk, 9))
    scheduler = FakeScheduler()
    job = scheduler.submit(state=RUNNING)
    (outcome,) = cluster.lockstep.run([lambda clock: conclude_attempt(cluster.run.paths, scheduler, job, 0, 1, clock)])
    assert (outcome.decision, outcome.failures) == (("requeued" if trained else "stopped"), 1)


@pytest.mark.parametrize(
    ("told", "end"),
    [
        ([], None),
        (["draining"], "preempted"),
        (["draining", "failed"], "failed"),
        (["failed", "draining"], "failed"),
        (["draining", "training_finished"], "finished"),
        (["failed", "training_finished"], "failed"),
        (["training_finished", "failed"], "finished"),
        (["draining", "training_finished", "failed"], "finished"),
    ],
)
def test_nothing_that_is_told_after_the_end_of_training_changes_it(told: list[EventName], end: End | None) -> None:
    assert shutdown_reason(told) == end


@every_lag
def test_ranks_that_see_node_records_claims_and_world_late_meet_all_the_same(lags: Mapping[int, float]) -> None:
    plan = make_plan(make_config(resources={"trainer": {"nodes": 2}, "inference": {"nodes": 2}}))
    simulation = Simulation(plan, make_node_infos(plan.ranks), Faults(lags=lags), seconds=300.0, lease=300.0 / 8).run()
    assert [rank.error for rank in simulation.ranks] == [None] * plan.ranks
    assert len({rank.world for rank in simulation.ranks}) == 1
