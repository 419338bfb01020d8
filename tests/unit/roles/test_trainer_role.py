"""How the agent starts the trainer."""

import msgspec

from pipeline.roles import trainer
from pipeline.roles.role_context import RoleContext
from pipeline.utils.network_interfaces import interface_of
from pipeline.utils.shared_dir import FileSharedDir
from tests.fakes.run_directory import FakeRun


def launched(root, address):
    """The trainer's launch on a node with this address."""
    run = FakeRun(root / "run")
    attempt = run.attempt("12-0")
    world = attempt.meet()
    placement = msgspec.structs.replace(world.of_role("trainer")[0], address=address)
    return trainer.launch(RoleContext(attempt.paths, run.config, world, placement))


def test_gloo_is_bound_to_the_interface_of_the_address_that_the_leader_proved(tmp_path):
    assert interface_of("127.0.0.2") is not None
    assert launched(tmp_path, "127.0.0.2").env["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.2")


def test_gloo_chooses_by_itself_when_no_interface_carries_the_address(tmp_path):
    assert "GLOO_SOCKET_IFNAME" not in launched(tmp_path, "203.0.113.9").env


def test_a_colocated_trainer_has_a_lower_priority_than_its_server(tmp_path, monkeypatch):
    def env(name, colocate):
        run = FakeRun(tmp_path / name)
        attempt = run.attempt("12-0")
        world = attempt.meet()
        resources = run.config.resources.model_copy(update={"colocate": colocate})
        config = run.config.model_copy(update={"resources": resources})
        return trainer.launch(RoleContext(attempt.paths, config, world, world.of_role("trainer")[0])).env

    assert env("a", True)["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert "CUDA_MPS_CLIENT_PRIORITY" not in env("b", False)
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "0")
    assert env("c", True)["CUDA_MPS_CLIENT_PRIORITY"] == "0"


def test_every_node_but_the_first_is_told_elsewhere_that_it_is_ready(tmp_path):
    run = FakeRun(tmp_path / "run")
    attempt = run.attempt("12-0")
    world = attempt.meet()
    first = world.of_role("trainer")[0]
    second = msgspec.structs.replace(first, index=1, rank=first.rank + 1)
    contexts = [RoleContext(attempt.paths, run.config, world, placement) for placement in (first, second)]
    assert [trainer.launch(context).reports_state for context in contexts] == [False, True]


def test_the_report_of_another_node_is_looked_for_by_listing_its_folder(tmp_path, monkeypatch):
    run = FakeRun(tmp_path / "run")
    attempt = run.attempt("12-0")
    world = attempt.meet()
    context = RoleContext(attempt.paths, run.config, world, world.of_role("trainer")[0])
    names = FileSharedDir.names

    def listed(directory, folder=""):
        if directory._root / folder == attempt.paths.statuses:
            context.report("ready")
        return names(directory, folder)

    monkeypatch.setattr(FileSharedDir, "names", listed)
    assert not context.is_ready()
    assert trainer.is_ready(context)
