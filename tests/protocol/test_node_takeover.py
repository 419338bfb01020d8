"""A spare node takes over the roles of a lost one; with real supervisors and processes."""

import errno
import os
import signal
from collections.abc import Callable
from functools import partial

import pytest

from pipeline.roles.role_context import RoleContext
from pipeline.run.notices import read_notices
from pipeline.utils.waiting import wait_for
from slurm.agent.node_takeover import RESTARTS_PER_LOSS, replace_lost_node
from slurm.submission.compose_config import compose_config
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.protocol.small_roles import Attempt

pytestmark = pytest.mark.integration

UP = ["starting", "ready"]


def test_a_spare_takes_over_and_the_lost_agent_that_still_runs_ends_its_roles_and_publishes_nothing(
    attempt: Callable[..., Attempt],
) -> None:
    run = attempt(spare=True)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    lost, config = run.pid_of("inference"), make_config()
    assert replace_lost_node(run.paths, config, 2, "no sign of life", "agent.1") == (True, "")
    assert replace_lost_node(run.paths, config, 2, "no sign of life", "agent.0") == (True, ""), "it was replaced before"
    run.notices[2].reason = "SIGTERM"
    wait_for("the server on the spare", partial(run.has_been, "inference.0", UP * 2), WAIT_SECONDS)
    wait_for("the end of the lost agent", lambda: 2 in run.ends, WAIT_SECONDS)
    assert run.pid_of("inference") != lost
    assert not run.events.read_all(), "the lost agent drains nothing"
    (notice,) = read_notices(run.paths)
    assert notice.text == "rank 3 takes over inference.0 of rank 2, which is lost: no sign of life"

    os.kill(run.pid_of("inference"), signal.SIGKILL)
    assert run.join() == {"failed", "preempted"}, "its restarts are counted there, and it has none"
    assert run.first_failure.rank == 3
    assert run.ends[2] == "preempted"
    assert run.left() == set()


def test_a_disk_that_fails_for_a_moment_does_not_end_the_agent_of_the_spare(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attempt(spare=True)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    forget, errors = RoleContext.forget_status, [errno.EIO, errno.ESTALE]

    def fails(context: RoleContext) -> None:
        if errors:
            raise OSError(errors.pop(), "the disk fails")
        forget(context)

    monkeypatch.setattr(RoleContext, "forget_status", fails)
    assert replace_lost_node(run.paths, make_config(), 2, "gone", "agent.1") == (True, "")
    wait_for("the server on the spare", partial(run.has_been, "inference.0", UP * 2), WAIT_SECONDS)
    assert not errors
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished", "preempted"}


def test_a_trainer_on_a_spare_node_has_a_later_restart_number_and_the_run_ends_with_it(
    attempt: Callable[..., Attempt],
) -> None:
    run = attempt(spare=True)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    assert replace_lost_node(run.paths, make_config(), 1, "killed by SIGKILL", "agent.0") == (True, "")
    wait_for("the trainer on the spare", partial(run.has_been, "trainer.0", UP * 2), WAIT_SECONDS)
    assert run.restart_of("trainer") == RESTARTS_PER_LOSS
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished", "preempted"}
    assert (run.ends[1], run.ends[3]) == ("preempted", "finished")
    assert run.left() == set()


def test_a_node_that_cannot_be_replaced_is_left_to_fail_the_attempt_and_so_is_every_node_of_an_ending_one(
    attempt: Callable[..., Attempt],
) -> None:
    run = attempt(spare=True)
    replaced, why = replace_lost_node(run.paths, make_config(), 0, "gone", "agent.2")
    assert (replaced, why.partition(":")[0]) == (False, "redis.0, preprocessor.0, actor.0")
    none = compose_config(["experiment=demo", "recovery.nodes=0"])
    assert "recovery.nodes=0" in replace_lost_node(run.paths, none, 2, "gone", "agent.1")[1]
    run.events.publish("training_finished", "trainer.0")
    assert replace_lost_node(run.paths, make_config(), 2, "gone", "agent.1") == (False, "")
    assert run.join() == {"finished"}
