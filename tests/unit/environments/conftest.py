"""What the tests of tasks share."""

from collections.abc import Iterator

import pytest

from pipeline.environments import sandbox


@pytest.fixture(scope="package", autouse=True)
def _code_runs_everywhere() -> Iterator[None]:
    """Where the kernel gives no namespaces, code runs without them; tests of what they do are skipped there."""
    if sandbox.missing_namespaces():
        sandbox.choose_mode("none")
    yield
    sandbox.choose_mode("namespaces")
