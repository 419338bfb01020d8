"""A shell in the sandbox, whose files last from one command to the next.

Owns the sandbox's process and the exchange with the program in it (`shell_guest`). Promises that every exchange has a
deadline; that a sandbox which ended or does not reply raises `ShellLost`, now and at every later exchange, so that no
late reply counts as that of another request; and that all processes of the sandbox end with the session.
"""

import base64
import json
import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from pipeline.environments.harbor import shell_guest
from pipeline.environments.sandbox import open_python

REPLY_SECONDS = 60.0
"""Time for the sandbox to start, and for a reply beyond the command's own timeout."""
MAX_REPLY = 1 << 22
ENDED = "the sandbox has ended; a command may have killed its processes"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ShellError(Exception):
    """The sandbox could not do what was requested."""


class ShellLost(ShellError):
    """The sandbox ended or gave no usable reply, and the session cannot be used any more."""


@dataclass(frozen=True)
class CommandResult:
    """The output of a command, standard output and errors, and its exit code; None if it exceeded its timeout."""

    output: str
    code: int | None


class ShellSession:
    """The shell, while its context is open."""

    def __init__(self, process: "Popen[bytes]", workdir: str, env: Mapping[str, str]) -> None:
        self._process, self._workdir = process, workdir
        self._env = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/tmp", **env}
        self._buffer, self._lost = b"", ""
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    def run(self, command: Sequence[str], seconds: float, **env: str) -> CommandResult:
        """Run a command in the working directory."""
        request = {"run": list(command), "cwd": self._workdir, "env": {**self._env, **env}, "seconds": seconds}
        reply = self._exchange(request, seconds + REPLY_SECONDS)
        return CommandResult(str(reply["output"]), reply["code"])

    def write(self, files: Mapping[str, bytes], clear: Sequence[str] = ()) -> None:
        """Write files by their absolute paths, after removing all entries of the directories `clear`."""
        encoded = {path: base64.b64encode(content).decode() for path, content in files.items()}
        self._exchange({"files": encoded, "clear": list(clear)}, REPLY_SECONDS)

    def kill_all(self) -> None:
        """End all processes that commands have started."""
        self._exchange({"kill": True}, REPLY_SECONDS)

    def read(self, paths: Sequence[str]) -> str | None:
        """The text of the first of these files that exists."""
        text = self._exchange({"read": list(paths)}, REPLY_SECONDS)["text"]
        return None if text is None else str(text)

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        if self._lost:
            raise ShellLost(self._lost)
        until = time.monotonic() + seconds
        try:
            self._send(json.dumps(request).encode() + b"\n", until)
            reply = json.loads(self._line(until))
        except TimeoutError:
            self._lost = f"the sandbox gave no reply within {seconds:g} s"
            raise ShellLost(self._lost) from None
        except (OSError, EOFError, ValueError):
            self._lost = ENDED
            raise ShellLost(self._lost) from None
        if "failed" in reply:
            raise ShellError(str(reply["failed"]))
        return dict(reply)

    def _send(self, data: bytes, until: float) -> None:
        """Write all of a request; `TimeoutError` if the program does not read it in time."""
        assert self._process.stdin is not None
        number, left = self._process.stdin.fileno(), memoryview(data)
        while left:
            _, writable, _ = select.select([], [number], [], max(0.0, until - time.monotonic()))
            if not writable:
                raise TimeoutError
            left = left[os.write(number, left) :]

    def _line(self, until: float) -> bytes:
        """The next line of the program; `TimeoutError` without one in time, `EOFError` at its end."""
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([number], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise TimeoutError
            more = os.read(number, 1 << 16)
            if not more or len(self._buffer) > MAX_REPLY:
                raise EOFError
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@contextmanager
def open_shell(
    directories: Sequence[str], workdir: str, env: Mapping[str, str], seconds: float, memory_bytes: int
) -> Iterator[ShellSession]:
    """A shell in a new sandbox. `directories` of the root are writable; `seconds` bounds the CPU time of a process, and
    `memory_bytes` its memory. `ConfigError` where code may not run."""
    code = Path(shell_guest.__file__).read_text()
    with open_python(code, seconds, memory_bytes, directories) as process:
        yield ShellSession(process, workdir, env)
