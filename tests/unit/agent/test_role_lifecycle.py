"""The life of a role, and the order in which a run comes down."""

import itertools
from pathlib import Path
from typing import get_args

import pytest

from pipeline.errors import InvalidTransitionError
from pipeline.run.events import Events
from pipeline.topology.plan import Placement, RoleName, World
from slurm.agent import role_lifecycle
from tests.fakes import agents


def test_a_role_lives_from_waiting_to_stopped() -> None:
    state: role_lifecycle.State = "waiting"
    for event in ("start", "became_ready", "stop_requested", "ended"):
        state = role_lifecycle.advance("actor.0", state, event)  # type: ignore[arg-type]
    assert state == "stopped"


def test_what_the_table_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(InvalidTransitionError, match=r"actor\.0: event 'start' is not allowed in state 'ready'"):
        role_lifecycle.advance("actor.0", "ready", "start")


def test_nothing_leaves_an_end_state() -> None:
    for state, event in itertools.product(("stopped", "failed"), get_args(role_lifecycle.RoleEvent)):
        with pytest.raises(InvalidTransitionError):
            role_lifecycle.advance("redis.0", state, event)  # type: ignore[arg-type]


def test_every_role_has_one_place_in_the_descent() -> None:
    assert sorted(itertools.chain(*role_lifecycle.SHUTDOWN_ORDER)) == sorted(get_args(RoleName))


def test_redis_waits_for_all_who_talk_to_it() -> None:
    roles: tuple[RoleName, ...] = ("redis", "actor", "preprocessor", "trainer", "inference")
    places = tuple(Placement(role=role, index=0, rank=0, address="127.0.0.2") for role in roles)
    world = World(run_id="r", attempt="a", epoch=1, leader=0, secret="s", placements=places)
    waits = {place.role: {other.role for other in role_lifecycle.must_wait_for(place, world)} for place in places}
    assert waits["redis"] == {"actor", "preprocessor", "trainer", "inference"}
    assert waits["trainer"] == {"actor", "preprocessor"}
    assert waits["actor"] == set()


@pytest.mark.parametrize("failed_after", [float("inf"), 0.5, 0.9])
def test_a_failure_gives_a_trainer_that_commits_already_no_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed_after: float
) -> None:
    monkeypatch.setattr(agents, "COMMIT_SECONDS", float("inf"))
    told = 30.0
    cluster = agents.make_cluster(tmp_path, {}, signals=dict.fromkeys(range(agents.RANKS), told))
    grace, rule = cluster.run.config.cluster.grace_seconds, cluster.rule

    def rule_while_another_agent_fails(name: str) -> int | None:
        if cluster.time >= told + failed_after * grace:
            Events(cluster.paths, cluster.views[4]).publish("failed", "agent.4")
        return rule(name)

    monkeypatch.setattr(cluster, "rule", rule_while_another_agent_fails)
    end_of_trainer = cluster.start(monkeypatch)[1]
    assert (end_of_trainer == "preempted") == (failed_after > 1)
    assert cluster.children["trainer.0"].asked == pytest.approx(told + grace, abs=1)
