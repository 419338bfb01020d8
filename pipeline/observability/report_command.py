"""The command that writes a report. For a run that does not exist: one error line, and exit code 2."""

import sys
from collections.abc import Sequence

from pipeline.errors import RollcallError
from pipeline.observability.report_page import write_report
from pipeline.observability.run_history import find_run, read_history


def main(arguments: Sequence[str]) -> int:
    """Write the report of the run that the arguments name. Returns the exit code."""
    try:
        print(write_report(read_history(find_run(arguments))))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
