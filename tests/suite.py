"""The whole suite: `python -m tests.suite [arguments of pytest]`, or `make test`.

A test of other processes can fail because the machine was busy. What fails in a file of such tests is run once more in
the same run, alone: together, as its tests may have failed together, like those of one Slurm whose daemon crashed. What
passes then is printed under "flaky" with both outputs, and the suite passes. Nothing else is tried twice: not a test of
one process, and not failures in many files, which are no accident. A flaky test is still a fault: `docs/flakes.md`
lists each with its cause.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.workers import WORKERS

MAX_FILES_TRIED_AGAIN = 5
SUITE_SECONDS, AGAIN_SECONDS = 4800, 660
"""Deadlines of a run of all tests and of one test: pytest itself can hang, as when one of its workers dies."""
SUITE = ("-m", "not trial and not gpu", "-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")
SUITE += ("-p", "tests.workers")
REPORTS = ("-p", "tests.times", "--failures")
FAILED, OUT_OF_TIME = 1, 124
"""Exit codes: pytest's own when tests failed, and ours when it did not end. Any but 0 and `FAILED` means that not all
tests were run."""


class Flake(NamedTuple):
    """A test that failed and then passed."""

    test: str
    first: str
    second: str


def main(arguments: Sequence[str], suite: Sequence[str] = SUITE) -> int:
    """Exit code of the suite; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "failed.json"
        code = _pytest([*suite, *REPORTS, str(file), *arguments], seconds=SUITE_SECONDS).returncode
        if code != FAILED:
            return code
        failed = json.loads(file.read_text())
    if firm := [entry["test"] for entry in failed if not entry["waits"]]:
        return _end("not tried again, since they wait for no other process", firm)
    if not failed:
        return FAILED
    files: dict[str, list[dict[str, str]]] = {}
    for entry in failed:
        files.setdefault(entry["test"].partition("::")[0], []).append(entry)
    if len(files) > MAX_FILES_TRIED_AGAIN:
        reason = f"not tried again, since tests of more than {MAX_FILES_TRIED_AGAIN} files failed"
        return _end(reason, [entry["test"] for entry in failed])
    flakes = []
    for entries in files.values():
        tests = [entry["test"] for entry in entries]
        print("\nonce more, alone:", *tests, sep="\n  ", flush=True)
        again = _pytest([*tests, "-rA", "-n", "0"], captured=True, seconds=min(len(tests), 3) * AGAIN_SECONDS)
        if again.returncode:
            print(again.stdout)
            return _end("failed twice, one of", tests)
        flakes += [Flake(entry["test"], entry["output"], again.stdout) for entry in entries]
    _tell(flakes)
    return 0


def _pytest(
    arguments: Sequence[str], *, captured: bool = False, seconds: float | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "tests.failures", *arguments]
    output = subprocess.PIPE if captured else None
    # Processes that tests kill leave their temporary folders. pytest's own stay where they are, to be looked at.
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o1777)  # as /tmp: some tests have processes of other users
        environment = {**os.environ, "PYTEST_DEBUG_TEMPROOT": tempfile.gettempdir(), "TMPDIR": folder}
        try:
            return subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, text=True, timeout=seconds, env=environment
            )
        except subprocess.TimeoutExpired as late:
            print(late, flush=True)
            return subprocess.CompletedProcess(command, OUT_OF_TIME, f"{late}\n{late.stdout!r}")


def _end(reason: str, tests: Sequence[str]) -> int:
    print(f"\n{reason}:", *tests, sep="\n  ", flush=True)
    return FAILED


def _tell(flakes: Sequence[Flake]) -> None:
    for flake in flakes:
        print(f"\n===== flaky: {flake.test}\n----- it failed:\n{flake.first}\n----- alone it passed:\n{flake.second}")
    names = "\n  ".join(flake.test for flake in flakes)
    print(f"\n{len(flakes)} flaky, each a fault to be found and listed in docs/flakes.md:\n  {names}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
