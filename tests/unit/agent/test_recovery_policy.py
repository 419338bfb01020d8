"""The table of restarts in place: which end of which role is followed by a restart, and how often."""

from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.cross_checks import check_config
from pipeline.config.recovery_keys import RecoveryConfig
from pipeline.errors import ConfigError, StreamError, would_recur
from pipeline.roles.role_context import RoleContext
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, down_mark
from pipeline.topology.plan import Placement, RoleName, World
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.agent_heartbeat import ExitMarkers
from slurm.agent.recovery_policy import RECOVERY, EndKind, RestartBudget, ServerQuorum
from slurm.agent.server_losses import ServerLosses
from tests.fakes.configs import make_config

ROLES: tuple[RoleName, ...] = get_args(RoleName)


def test_every_role_has_a_row_and_a_key() -> None:
    assert set(RECOVERY) == set(RecoveryConfig.model_fields) - {"nodes"} == set(ROLES)


def test_a_trainer_of_several_nodes_or_with_its_own_restarts_ends_the_attempt() -> None:
    assert RestartBudget.from_config("trainer", make_config(), seats=1).limit == 3
    assert RestartBudget.from_config("trainer", make_config(), seats=2).limit == 0
    jobs = make_config(training={"steps": 0, "jobs": "/jobs", "prompts_per_step": 1})
    assert RestartBudget.from_config("trainer", jobs).limit == 0


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_restarted_as_often_as_its_budget_allows_and_never_after_a_final_error(role: RoleName) -> None:
    budget = RestartBudget.from_config(role, make_config(recovery={role: 2}))
    kinds = get_args(EndKind)
    assert [kind for kind in kinds if not budget.allows(kind)] == ["final"]
    assert not any(budget.allows(kind, is_stuck=True) for kind in kinds)
    budget.use("signal")
    assert budget.allows("signal")
    budget.use("exit")
    assert not any(budget.allows(kind) for kind in kinds)
    assert str(budget) == f"restarted, 2 of recovery.{role}=2"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_is_not_ready_in_time_is_started_once_more_and_a_server_within_its_budget(role: RoleName) -> None:
    budget = RestartBudget(role, 3)
    for late in range(4):
        assert budget.allows("late") == (late < (3 if role == "inference" else 1))
        if budget.allows("late"):
            budget.use("late")
    assert budget.allows("exit") == (role != "inference")


@pytest.mark.parametrize(
    ("error", "starting", "later"),
    [
        (OSError("a port is taken"), False, False),
        (RuntimeError("CUDA error: out of memory"), False, False),
        (StreamError("cannot listen"), False, False),
        (ConfigError("key", 1, "2"), True, True),
        (ImportError("no module"), True, False),
        (KeyError("reward"), True, False),
        (NotImplementedError("of this model"), True, False),
    ],
)
def test_an_error_of_code_or_input_would_recur_at_the_start(error: Exception, starting: bool, later: bool) -> None:
    assert (would_recur(error, starting=True), would_recur(error, starting=False)) == (starting, later)


@pytest.mark.parametrize(
    ("servers", "wanted", "needed"), [(1, "half", 1), (4, "half", 2), (5, "half", 3), (4, "all", 4), (4, 1, 1)]
)
def test_the_quorum_is_a_number_or_a_part_of_the_servers(servers: int, wanted: str | int, needed: int) -> None:
    config = make_config(resources={"inference": {"servers": servers}}, inference={"min_servers": wanted})
    assert config.server_quorum == needed
    quorum = ServerQuorum(servers, needed)
    assert [lost for lost in range(servers + 1) if quorum.survives(lost)] == list(range(servers - needed + 1))


def test_a_run_whose_servers_are_not_alike_needs_all_of_them() -> None:
    only = make_config(
        resources={"inference": {"servers": 4}}, training={"steps": 0, "prompts_per_step": 1}, evaluation={"only": True}
    )
    assert only.server_quorum == 4


def test_more_servers_than_there_are_cannot_be_needed() -> None:
    config = make_config(resources={"inference": {"servers": 2}}, inference={"min_servers": 3})
    with pytest.raises(ConfigError, match=r"inference\.min_servers=3: expected at most 2, the servers of"):
        check_config(config)


def a_failure(role: str, cause: str) -> FirstFailure:
    return FirstFailure(role=role, rank=0, cause=cause, exit_code=1, time=0.0, log="")


def test_agents_that_abandon_servers_count_those_of_others_and_one_ends_the_attempt(tmp_path: Path) -> None:
    config = make_config(resources={"inference": {"servers": 4}})
    servers = tuple(Placement(role="inference", index=n, rank=n, address="", ports=(n,)) for n in range(4))
    world = World(run_id="r", attempt="7-0", epoch=1, leader=0, secret="s", placements=servers)
    paths = AttemptPaths(tmp_path, "r", "7-0")
    attempt = FileSharedDir(paths.root)
    agents = [
        ServerLosses([RoleContext(paths, config, world, server)], ExitMarkers(attempt, 0.0)) for server in servers[:2]
    ]

    def abandon(agent: int) -> str:
        note = agents[agent].abandon(servers[agent], a_failure(servers[agent].name, f"cause {agent}"))
        attempt.replace(down_mark(servers[agent].name), "failed")
        return note

    assert abandon(0) == "; abandoned: 3 of 4 servers are left, and 2 are needed"
    assert abandon(1) == "; abandoned: 2 of 4 servers are left, and 2 are needed"
    assert [agent.fatal_failure() for agent in agents] == [None, None]
    assert agents[0].abandon(servers[3], a_failure("inference.3", "cause 3")) == "", "it ends the attempt itself"
    attempt.replace(down_mark("inference.2"), "failed")
    failures = [agent.fatal_failure() for agent in agents]
    assert [failure.cause for failure in failures if failure] == [
        f"cause {agent}; abandoned: 1 of 4 servers are left, and 2 are needed" for agent in (0, 1)
    ]
    actor = Placement(role="actor", index=0, rank=0, address="")
    assert agents[0].abandon(actor, a_failure("actor.0", "")) == ""


def test_pauses_grow_to_their_limit_and_begin_again_after_a_process_that_was_ready_for_longer() -> None:
    budget = RestartBudget("inference", 3)
    assert [budget.next_pause(0.0), budget.next_pause(1.0), budget.next_pause(0.0)] == [1.0, 1.5, 2.25]
    assert max(budget.next_pause(2.0) for _ in range(20)) == 30.0
    assert budget.next_pause(30.0) == 30.0
    assert budget.next_pause(30.1) == 1.0


def test_a_process_that_never_was_ready_is_replaced_after_a_second_at_least() -> None:
    budget = RestartBudget("redis", 3)
    assert [budget.next_pause(0.1), budget.next_pause(0.0), budget.next_pause(0.0)] == [0.2, 1.0, 1.5]
