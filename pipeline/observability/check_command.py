"""The command that checks a run: `launchers/check.py run=…`.

For a run that does not exist: one error line, and exit code 2. With problems, one line each and exit code 1.
"""

import sys
from collections.abc import Sequence

from pipeline.errors import RollcallError
from pipeline.observability.run_check import RunCheck, check_run
from pipeline.observability.run_history import find_run


def main(arguments: Sequence[str]) -> int:
    """Check the run that the arguments name. Returns the exit code."""
    try:
        check = check_run(find_run(arguments))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join([*(f"problem: {problem}" for problem in check.problems), summary(check)]))
    return 1 if check.problems else 0


def summary(check: RunCheck) -> str:
    """The checked amounts in one line."""
    state = "finished" if check.is_finished else "not finished, checked up to its last checkpoint"
    result = f"{len(check.problems)} problems" if check.problems else "sound"
    return (
        f"{result}: {check.steps} RL steps, {check.positions} positions done, {check.in_flight} in flight; the stored "
        f"samples of {check.stored} of {check.groups} trained groups are those that were trained ({state})"
    )
