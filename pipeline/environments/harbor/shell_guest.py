"""The program in the sandbox that runs the commands of a shell session.

Owns requests and replies: one JSON line each, on the standard streams that the program starts with. Promises that no
command has these streams or can trace this process, so that no command can forge a reply; that a command ends with its
timeout; and that a reply has at most `MAX_TEXT` characters of output. Uses only the standard library:
`pipeline.environments.harbor.shell_session` passes this file's text to the sandbox.

    {"files": {"/app/a": "<base64>"}, "clear": ["/tests"]}      → {}
    {"run": ["bash", "-c", "ls"], "cwd": "/app", "env": {…}, "seconds": 5}    → {"output": "a\\n", "code": 0}
    {"kill": true}                                              → {}
    {"read": ["/logs/verifier/reward.txt"]}                     → {"text": "1\\n"}, the first that exists, or null
"""

import base64
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_TEXT = 16_000
FULL = "the sandbox's disk is full; commands have filled it"
KILL_SECONDS = 10.0
_PR_SET_DUMPABLE = 4


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command. Its output is kept in memory, so a full disk loses none of it."""
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        process = subprocess.Popen(
            request["run"],
            cwd=request["cwd"] if Path(request["cwd"]).is_dir() else "/",
            env=request["env"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(request["seconds"])
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(MAX_TEXT)
        if size > MAX_TEXT:
            # Both ends: an error is usually last.
            output.seek(size - MAX_TEXT // 2)
            text = text[: MAX_TEXT // 2] + b"\n[...]\n" + output.read(MAX_TEXT // 2)
    return {"output": text.decode(errors="replace"), "code": code}


def write(request: dict[str, Any]) -> dict[str, Any]:
    """Empty some directories and write files."""
    for directory in request.get("clear", ()):
        # These programs also empty directories without permissions, and those that are nested without end.
        subprocess.run(["chmod", "-R", "u+rwX", directory], check=False)
        subprocess.run(["find", directory, "-mindepth", "1", "-delete"], check=True)
    for name, content in request["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
        path.chmod(0o755)
    return {}


def kill() -> dict[str, Any]:
    """Kill all other processes of the sandbox, and wait until they are gone; its first process cannot be killed from
    inside."""
    deadline = time.monotonic() + KILL_SECONDS
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while left := others():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} of the sandbox do not end")
        time.sleep(0.002)
    return {}


def others() -> list[int]:
    """The processes of the sandbox that are alive, without its first one and this one."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if int(folder.name) not in (1, os.getpid()) and state not in "ZX":
                alive.append(int(folder.name))
    return alive


def read(paths: list[str]) -> dict[str, Any]:
    """The text of the first of the files that exists, is a regular file and no link."""
    for path in paths:
        with suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(number, "rb") as file:
                return {"text": file.read(MAX_TEXT).decode(errors="replace")}
    return {"text": None}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request."""
    if "run" in request:
        return run(request)
    if "files" in request:
        return write(request)
    return read(request["read"]) if "read" in request else kill()


def main() -> None:
    """Answer requests until the session is closed."""
    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("cannot prevent tracing")
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    for line in requests:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 a process boundary: a disk filled by the commands, a removed directory
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            reply = {"failed": FULL if full else f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply).encode() + b"\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
