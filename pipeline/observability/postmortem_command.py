"""The command that writes the post-mortem of an attempt. For a run that does not exist: one error line, exit code 2."""

import sys
import time
from collections.abc import Sequence

from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.failure_verdict import verdict_of
from pipeline.observability.postmortem_archive import write_postmortem
from pipeline.observability.run_history import attempt_names, closest_name, find_run, read_attempt
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files

ATTEMPT = "attempt="


def main(arguments: Sequence[str]) -> int:
    """Write the archive of `run=…`, of its newest attempt or of `attempt=…`. Returns the exit code."""
    try:
        paths = _find_attempt(arguments)
        print(verdict_of(read_attempt(paths), time.time()))
        print(write_postmortem(paths))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: the archive cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


def _find_attempt(arguments: Sequence[str]) -> AttemptPaths:
    run = RunPaths(find_run([argument for argument in arguments if not argument.startswith(ATTEMPT)]))
    names = attempt_names(run)
    if not names:
        raise ConfigError("run", run.root.name, "a run with an attempt", "its job has not started yet")
    chosen = [argument.removeprefix(ATTEMPT) for argument in arguments if argument.startswith(ATTEMPT)]
    name = chosen[-1] if chosen else names[-1]
    if name not in names:
        raise ConfigError("attempt", name, "an attempt of this run", closest_name(name, names))
    identity = shared_files.read_document(run.run, RunIdentity)
    return run.attempt(identity.run_id if identity else "unknown", name)
