"""What the cluster tests share. A machine without Slurm skips them and says so; under CI that is a failure."""

import os
from collections.abc import Generator, Iterator

import pytest

from tests.cluster.networks import NetworkedCluster, why_no_networks
from tests.cluster.slurm_cluster import SlurmCluster, missing_commands

LACKING: set[str] = set()


@pytest.fixture(scope="session")
def requires_slurm() -> None:
    """Skip, or under CI fail, where Slurm is not installed."""
    if missing := missing_commands():
        if os.environ.get("CI"):
            pytest.fail(missing)
        _skip_loudly(missing)


@pytest.fixture(scope="session")
def requires_networks(requires_slurm: None) -> None:
    """Skip where the machine does not let nodes have networks of their own: that is the machine's right, CI or not."""
    if reason := why_no_networks():
        _skip_loudly(reason)


@pytest.fixture(scope="module")
def cluster(requires_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of four nodes that the tests of a module share: leave no job behind, and every node idle."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def networked(requires_networks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedCluster]:
    """The same on a network of its own, every node with its own address: heal what you cut."""
    with NetworkedCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failed test the state of its Slurm."""
    report = yield
    if report.failed:
        used = {id(slurm): slurm for slurm in item.funcargs.values() if isinstance(slurm, SlurmCluster)}
        report.sections += [("Slurm", slurm.describe()) for slurm in used.values()]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in sorted(LACKING):
        terminalreporter.write_line(f"CLUSTER TESTS DID NOT RUN: {reason}", red=True, bold=True)


def _skip_loudly(reason: str) -> None:
    """Skip the test, and say why at the end of the session."""
    LACKING.add(reason)
    pytest.skip(reason)
