"""Commands in the tests' process start no fork server: most are refused before it would be of use."""

import pytest

from pipeline.utils.fork_server import VARIABLE


@pytest.fixture(autouse=True)
def without_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/no/server")
