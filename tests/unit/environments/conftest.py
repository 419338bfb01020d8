"""What the tests of tasks share."""

import os
from collections.abc import Iterator

import pytest

from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import sandbox

IMAGE = os.environ.get("ROLLCALL_TEST_IMAGE", "")
"""An unpacked root directory with Python, for the kinds that need an image."""
SANDBOXES = {
    "namespaces": SandboxConfig(),
    "bubblewrap": SandboxConfig(kind="bubblewrap"),
    "bubblewrap with an image": SandboxConfig(kind="bubblewrap", image=IMAGE),
    "podman": SandboxConfig(kind="podman", image=IMAGE),
    "apptainer": SandboxConfig(kind="apptainer", image=IMAGE),
}


@pytest.fixture(scope="package", autouse=True)
def _code_runs_everywhere() -> Iterator[None]:
    """Where the kernel gives no namespaces, code runs without them; tests of what they do are skipped there."""
    if sandbox.missing_sandbox(SandboxConfig()):
        sandbox.choose_sandbox(SandboxConfig(kind="none"))
    yield
    sandbox.choose_sandbox(SandboxConfig())


@pytest.fixture(params=list(SANDBOXES))
def sandbox_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    """Code runs in each kind of sandbox that this machine has."""
    chosen = SANDBOXES[request.param]
    if not chosen.image and request.param not in ("namespaces", "bubblewrap"):
        pytest.skip("ROLLCALL_TEST_IMAGE names no image")
    if why := sandbox.missing_sandbox(chosen):
        pytest.skip(why)
    monkeypatch.setattr(sandbox, "_chosen", chosen)
    return chosen
