"""A role under a debugger: which process waits for it, and that no deadline ends the wait."""

from pathlib import Path

import pytest

from pipeline.config.debug_keys import DEBUGGER_SECONDS
from pipeline.roles.role_context import RoleContext, read_config
from pipeline.run.paths import RunPaths
from pipeline.utils import remote_debugger
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun


def context_of(root: Path, placed: str, debugged: str = "") -> RoleContext:
    config = make_config(model={"path": "tiny_qwen3"}, debug={"role": debugged})
    run = FakeRun(root / "run", config)
    attempt = run.attempt("12-0")
    world = attempt.meet()
    (placement,) = (placement for placement in world.placements if placement.role == placed)
    return RoleContext(attempt.paths, run.config, world, placement)


@pytest.mark.parametrize(
    ("key", "role", "process", "waits"),
    [
        ("", "trainer", 0, False),
        ("trainer", "trainer", 0, True),
        ("trainer", "trainer", 1, False),
        ("trainer.1", "trainer", 1, True),
        ("trainer.1", "trainer", 0, False),
        ("actor", "actor", 0, True),
        ("actor", "trainer", 0, False),
    ],
)
def test_only_the_named_process_waits_for_a_debugger_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, role: str, process: int, waits: bool
) -> None:
    monkeypatch.setattr(remote_debugger, "wait_for_pdb", lambda say: say("waits for a debugger"))
    context = context_of(tmp_path, role, key)
    context.wait_for_debugger(process)
    status = context.status()
    assert (status.detail if status else "") == ("waits for a debugger" if waits else "")


def test_with_a_role_under_a_debugger_the_processes_read_deadlines_of_a_week(tmp_path: Path) -> None:
    paths = context_of(tmp_path, "trainer", "trainer").paths
    config = read_config(RunPaths(paths.run))
    deadlines = {config.cluster.heartbeat_seconds, config.cluster.startup_seconds, config.training.data_seconds}
    assert deadlines == {DEBUGGER_SECONDS}


def test_without_one_the_deadlines_are_those_of_the_config(tmp_path: Path) -> None:
    run = RunPaths(context_of(tmp_path, "trainer").paths.run)
    assert read_config(run).cluster.heartbeat_seconds == make_config().cluster.heartbeat_seconds
