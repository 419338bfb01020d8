"""The command that writes a run's trace, or sends it to a collector. For a run that does not exist: one error line, and
exit code 2."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.errors import RollcallError
from pipeline.observability.otlp_export import export_spans
from pipeline.observability.run_history import find_run, read_history
from pipeline.observability.run_trace import trace_events
from pipeline.utils import shared_files

_OPTIONS = ("trace=", "otlp=")


def main(arguments: Sequence[str]) -> int:
    """Write the trace of the run that the arguments name, by default as `trace.json` in its directory. With `otlp=URL`
    send it to that collector instead, or as well with `trace=`."""
    options = dict(argument.split("=", 1) for argument in arguments if argument.startswith(_OPTIONS))
    try:
        root = find_run([argument for argument in arguments if not argument.startswith(_OPTIONS)])
        history = read_history(root)
        if "otlp" in options:
            print(f"{export_spans(history, options['otlp'])} spans sent")
        if "trace" in options or "otlp" not in options:
            path = Path(options.get("trace") or root / "trace.json")
            trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(history)}
            shared_files.write_atomic(path, msgspec.json.encode(trace))
            print(f"{path}: open it at https://ui.perfetto.dev")
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
