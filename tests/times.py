"""A pytest plugin (`-p tests.times`) that prints where a run's time went: per file of tests, seconds and CPU seconds.

CPU seconds are those of the worker and of the processes it waited for, but not of Slurm's jobs or forked ranks.
`--times FILE` also writes the seconds of all files, as JSON; by those in `tests/times.json` the suite is ordered.
"""

import json
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

SHOWN = 10


class Spent(NamedTuple):
    """What the tests of one file took."""

    file: str
    began: float
    """Seconds since the epoch, as is `ended`."""
    ended: float
    cpu: float


class Times:
    """The times of the tests of this process; in the process that reports, those of all its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._spent: dict[str, Spent] = {}
        self._all: list[Spent] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began, cpu = time.time(), _cpu_seconds()
        result = yield
        file = item.nodeid.partition("::")[0]
        spent = self._spent.get(file, Spent(file, began, began, 0.0))
        spent = spent._replace(ended=time.time(), cpu=spent.cpu + _cpu_seconds() - cpu)
        self._spent[file] = spent
        return result

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["times"] = [tuple(spent) for spent in self._spent.values()]
        self._all.extend(self._spent.values())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._all.extend(Spent(*spent) for spent in getattr(node, "workeroutput", {}).get("times", []))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if file := self._config.getoption("--times"):
            seconds = {spent.file: round(spent.ended - spent.began) for spent in self._all}
            file.write_text(json.dumps(dict(sorted(seconds.items())), indent=0) + "\n")
        terminalreporter.section("slowest files")
        slowest = sorted(self._all, key=lambda spent: spent.began - spent.ended)
        for spent in slowest[:SHOWN]:
            terminalreporter.write_line(f"{spent.ended - spent.began:6.0f} s {spent.cpu:6.0f} s of CPU  {spent.file}")
        terminalreporter.write_line(f"CPU seconds of all tests: {sum(spent.cpu for spent in self._all):.0f}")


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, default=None, help="file for the times of all files, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(config))
