"""How the agent starts the trainer."""

import msgspec

from pipeline.roles import trainer
from pipeline.roles.context import RoleContext
from pipeline.system.network import interface_of
from tests.fakes.run_directory import FakeRun


def launched(root, address):
    """The trainer's launch on a node with this address."""
    run = FakeRun(root / "run")
    attempt = run.attempt("12-0")
    world = attempt.meet()
    place = msgspec.structs.replace(world.of_role("trainer")[0], address=address)
    return trainer.launch(RoleContext(attempt.paths, run.config, world, place))


def test_gloo_is_bound_to_the_interface_of_the_address_that_the_leader_proved(tmp_path):
    assert interface_of("127.0.0.2") is not None
    assert launched(tmp_path, "127.0.0.2").env["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.2")


def test_gloo_chooses_by_itself_when_no_interface_carries_the_address(tmp_path):
    assert "GLOO_SOCKET_IFNAME" not in launched(tmp_path, "203.0.113.9").env
