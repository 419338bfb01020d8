"""A function call in a program that a fork server forks, for functions whose imports take seconds.

    sizes = forked_call(address, "trainer", "pipeline.train.model.model_size", "sizes_of", config.model)

Promises that the call ends with its caller, that its output reaches the caller's error output, and that a long wait is
reported there once, with its reason. This module is also the program.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from typing import Any

from pipeline.utils.forked_process import ForkedProcess, ForkRequest

SECONDS = 300.0
"""Deadline of a call, with the imports for which it waits."""
SILENT_SECONDS = 10.0
"""Seconds after which a call reports what it waits for."""


def forked_call(address: str, stage: str, module: str, function: str, *arguments: Any) -> Any:
    """The result of `module.function(*arguments)`, in a program of the fork server's stage. Raises what it raises.

    `OSError` if there is no result: without a server, or from a program that was killed, missed the deadline, or does
    not find the function.
    """
    request = ForkRequest.of(address, stage, nests=False)
    if request is None:
        raise ConnectionError("there is no fork server")
    with tempfile.TemporaryFile() as call, tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as output:
        pickle.dump((module, function, arguments), call)
        call.seek(0)
        argv = [sys.executable, "-P", "-m", "pipeline.utils.forked_call"]
        program = request.send(argv, os.environ, [call.fileno(), result.fileno(), output.fileno()])
        try:
            code = _wait(program, f"{module}.{function}", stage)
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(f"{module}.{function} in a fork: no result within {SECONDS:g} s") from late
        finally:
            program.close()
        if code:
            raise ChildProcessError(f"{module}.{function} in a fork: {program.refusal or f'exit code {code}'}")
        output.seek(0)
        sys.stderr.write(output.read().decode(errors="replace"))
        result.seek(0)
        value, error = pickle.load(result)
    if error is not None:
        raise error
    return value


def _wait(program: ForkedProcess, call: str, stage: str) -> int:
    """The program's exit code; `subprocess.TimeoutExpired` after `SECONDS`."""
    silent = min(SILENT_SECONDS, SECONDS)
    with suppress(subprocess.TimeoutExpired):
        return program.wait(silent)
    reason = f"its process {program.pid} is at work" if program.pid else f"stage {stage!r} of the fork server imports"
    print(f"waiting for {call} for {silent:g} s, of {SECONDS:g} at most: {reason}", file=sys.stderr, flush=True)
    return program.wait(SECONDS - silent)


def main() -> None:
    """Read a call from standard input, and write its result and its exception to standard output."""
    result = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no result
    module, name, arguments = pickle.load(sys.stdin.buffer)
    function, value, error = getattr(import_module(module), name), None, None
    try:
        value = function(*arguments)
    except Exception as raised:  # noqa: BLE001 the caller raises it
        error = raised
    with os.fdopen(result, "wb") as stream:
        stream.write(pickle.dumps((value, error)))


if __name__ == "__main__":
    main()
