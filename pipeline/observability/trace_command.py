"""The command that writes a run's trace. For a run that does not exist: one error line, and exit code 2."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.errors import RollcallError
from pipeline.observability.run_history import find_run, read_history
from pipeline.observability.run_trace import trace_events
from pipeline.utils import shared_files

_OUT = "trace="


def main(arguments: Sequence[str]) -> int:
    """Write the trace of the run that the arguments name, by default `trace.json` in its directory."""
    try:
        root = find_run([argument for argument in arguments if not argument.startswith(_OUT)])
        out = next((Path(argument[len(_OUT) :]) for argument in arguments if argument.startswith(_OUT)), None)
        path = out or root / "trace.json"
        trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(read_history(root))}
        shared_files.write_atomic(path, msgspec.json.encode(trace))
        print(f"{path}: open it at https://ui.perfetto.dev")
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
