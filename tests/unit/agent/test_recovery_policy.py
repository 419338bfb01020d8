"""The table of restarts in place: which end of which role is followed by a restart, and how often."""

from typing import get_args

import pytest

from pipeline.config.recovery_keys import RecoveryConfig
from pipeline.topology.plan import RoleName
from slurm.agent.recovery_policy import RECOVERY, EndKind, RestartBudget
from tests.fakes.configs import make_config

ROLES: tuple[RoleName, ...] = get_args(RoleName)


def test_every_role_has_a_row_and_a_key() -> None:
    assert set(RECOVERY) == set(RecoveryConfig.model_fields) == set(ROLES)


def test_a_trainer_of_several_nodes_or_with_its_own_restarts_ends_the_attempt() -> None:
    assert RestartBudget.from_config("trainer", make_config(), seats=1).limit == 3
    assert RestartBudget.from_config("trainer", make_config(), seats=2).limit == 0
    jobs = make_config(training={"steps": 0, "jobs": "/jobs", "prompts_per_step": 1})
    assert RestartBudget.from_config("trainer", jobs).limit == 0


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_restarted_as_often_as_its_budget_allows_and_never_after_a_final_error(role: RoleName) -> None:
    budget = RestartBudget.from_config(role, make_config(recovery={role: 2}))
    kinds = get_args(EndKind)
    assert [kind for kind in kinds if not budget.allows(kind, progressed=True)] == ["final"]
    budget.used = 1
    assert budget.allows("signal", progressed=True)
    budget.used = 2
    assert not any(budget.allows(kind, progressed=True) for kind in kinds)
    assert str(budget) == f"restarted, 2 of recovery.{role}=2"


@pytest.mark.parametrize(("role", "again"), [("inference", True), ("actor", False), ("redis", False)])
def test_only_a_server_may_fail_before_it_is_ready_once_it_was_restarted(role: RoleName, again: bool) -> None:
    budget = RestartBudget(role, 3)
    assert not budget.allows("exit", progressed=False)
    budget.used = 1
    assert budget.allows("exit", progressed=False) == again


def test_pauses_grow_to_their_limit_and_begin_again_after_a_process_that_was_ready_for_longer() -> None:
    budget = RestartBudget("inference", 3)
    assert [budget.next_pause(0.0), budget.next_pause(1.0), budget.next_pause(0.0)] == [1.0, 1.5, 2.25]
    assert max(budget.next_pause(2.0) for _ in range(20)) == 30.0
    assert budget.next_pause(30.0) == 30.0
    assert budget.next_pause(30.1) == 1.0
