"""A pytest plugin (`-p tests.failures --failures FILE`) that writes down what failed, for `tests.suite`.

One JSON list: for each failed test its id, whether it waits for other processes (its mark says so), and its report.
"""

import json
from pathlib import Path
from typing import Any

import pytest

WAITING = ("integration", "cluster")
"""The marks of tests that other processes, and so a busy machine, can disturb."""


class Failures:
    """The failed tests of a session, in the process that reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        told = "\n".join([report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)])
        waits = any(mark in report.keywords for mark in WAITING)
        earlier = self._failed.get(report.nodeid, {"output": ""})["output"]
        self._failed[report.nodeid] = {
            "test": report.nodeid,
            "waits": waits,
            "output": f"{earlier}{report.when}:\n{told}\n",
        }

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(list(self._failed.values())))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, default=None, help="file for what failed, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--failures")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(file))
