"""Programs that a fork server starts, from the requester's side; see `pipeline.utils.fork_server`.

with ForkServer.start(stages, ready=2) as server:
    program = ForkedProcess(server.address, "trainer", argv, environment, streams)
"""

import array
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from pipeline.utils import fork_server
from pipeline.utils.fork_server import VARIABLE, Stage
from pipeline.utils.private_files import is_private
from pipeline.utils.waiting import Deadline

_MAX_ADDRESS = 107 - len("/1234567")
"""The kernel's limit for the path of a socket, with room for a socket of a nested server in the folder."""
_PADDING = "." * 8192
_PREFIX, _LOG = "rollcall-fork-", "log"
_YOUNG_SECONDS = 60.0
"""Age below which a folder without a log may belong to a process that is about to lock one, within milliseconds."""
END_SECONDS = 10.0
"""Time for the kernel to end a killed server."""
START_SECONDS = 30.0
"""How long a requester waits for a program to run. The server forks it within milliseconds of its request."""


class ForkServer:
    """A running fork server. It ends with the block, or with this process."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self._folder, self._process = folder, process
        self.address, self.pid = str(folder / "socket"), process.pid

    @classmethod
    def start(
        cls,
        stages: Sequence[Stage],
        ready: int,
        environment: Mapping[str, str] = os.environ,
        folders: Callable[[Path], Mapping[str, str]] = lambda _: {},
    ) -> "ForkServer":
        """Start a server. Its first stage and `ready` later ones are made at once, the others by their first request.

        `folders` returns further variables for the server, given its folder, which is removed when the server ends.

        Call it from a thread that outlives the server: the kernel ends the server with the thread. `OSError` if the
        server cannot be started.
        """
        folder = _make_folder()
        try:
            process = cls._popen(folder, stages, ready, {**environment, **folders(folder)})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, process)

    @staticmethod
    def _popen(
        folder: Path, stages: Sequence[Stage], ready: int, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, _locked_log(folder) as log:
            listening.bind(str(folder / "socket"))
            listening.listen(socket.SOMAXCONN)
            number = listening.fileno()
            arguments = (str(folder), str(os.getpid()), str(number), json.dumps([asdict(stage) for stage in stages]))
            return subprocess.Popen(
                [sys.executable, "-P", fork_server.__file__, *arguments, str(ready), _PADDING],
                env=_environment(environment),
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def kill(self) -> None:
        """End the server, but not its programs; its folder stays. Waits at most `END_SECONDS` for its end: a process
        that waits in the kernel ends later."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)

    def close(self) -> None:
        """End the server. Its programs stay."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""For numpy and scipy; and for pyarrow, which transformers imports by way of scikit-learn and pandas."""


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The server's variables: no thread may start when modules are imported, and the actor needs stable hashes."""
    inherited = {name: value for name, value in variables.items() if name != VARIABLE}
    return inherited | _WITHOUT_THREADS | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}


def _make_folder() -> Path:
    """A new folder that only its owner may enter, with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(folder)) > _MAX_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    _sweep(folder.parent)
    return folder


def _locked_log(folder: Path) -> IO[bytes]:
    """The server's log, locked as long as a process has it open: the server, its stages and keepers inherit it."""
    # It gets its name once it is locked, since a process that sweeps takes an unlocked log for a dead server's.
    new = folder / f"{_LOG}.new"
    log = new.open("ab")
    fcntl.flock(log, fcntl.LOCK_EX)
    new.rename(folder / _LOG)
    return log


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's servers that were killed together with their owners, so that none did, and of
    owners that were killed before they had a log."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, or another process removes it
            if is_private(folder):
                _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    """Remove a folder whose log no process has locked; `BlockingIOError` if one has."""
    if not (folder / _LOG).exists():
        if time.time() - folder.stat().st_mtime > _YOUNG_SECONDS:
            shutil.rmtree(folder)
        return
    with (folder / _LOG).open("rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


@dataclass(frozen=True)
class ForkRequest:
    """How a fork server is asked for a program: its address, the stage, and whether the program gets its own server."""

    address: str
    stage: str
    nests: bool = False

    @classmethod
    def of(cls, address: str, stage: str, nests: bool) -> "ForkRequest | None":
        """The request to the server at `address`; None without a server, or for a program that needs exec."""
        return cls(address, stage, nests) if address and stage else None

    def send(self, argv: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> "ForkedProcess":
        """Ask for a program. `OSError` if the server does not take the request."""
        return ForkedProcess(self.address, self.stage, argv, environment, streams, nests=self.nests)


class ForkedProcess:
    """A requested program. It is killed when this object is closed, or this process ends."""

    def __init__(
        self,
        address: str,
        stage: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        *,
        nests: bool = False,
    ) -> None:
        """Request `argv`, which starts with this interpreter. `streams` are the descriptors of its input, output and
        error output. `OSError` if the server does not take the request."""
        self.pid = 0
        """0 until the program runs."""
        self.returncode: int | None = None
        self.refusal = ""
        """Why there is no program."""
        variables = {name: value for name, value in environment.items() if name != VARIABLE}
        data = json.dumps([stage, list(argv), variables, str(Path.cwd()), nests]).encode()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect(address)
            self._connection.sendmsg(
                [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))], socket.MSG_DONTWAIT
            )
        except OSError:
            self._connection.close()
            raise

    def poll(self) -> int | None:
        """The exit code once the program has ended (negative: the signal), else None. Updates the attributes."""
        self._receive(0.0)
        return self.returncode

    def started(self, seconds: float = START_SECONDS) -> bool:
        """Wait until the program runs; False if the server refuses it, or does not start it in time: the request is
        then withdrawn."""
        deadline = Deadline("the program to run", seconds)
        while not self.pid and self.returncode is None:
            if not self._receive(deadline.left):
                self.refusal = f"the fork server did not start it within {seconds:g} s"
                self.close()
        return bool(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program; `subprocess.TimeoutExpired` after `timeout` seconds."""
        while self.returncode is None:
            if not self._receive(timeout):
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def close(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the program if it runs, or withdraw the request. Its exit code is then that of this signal."""
        if self.returncode is None:
            self._end(-number)

    def _receive(self, timeout: float | None) -> bool:
        """Read the next message, for which to wait at most `timeout` seconds; whether there was one."""
        if self.returncode is not None:
            return True
        self._connection.settimeout(timeout)
        try:
            kind, _, text = self._connection.recv(1024).decode().partition(" ")
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            kind, text = "", str(error)
        match kind:
            case "pid":
                self.pid = int(text)
            case "exit":
                self._end(int(text))
            case _ if self.pid:  # the keeper was killed, and the kernel has killed the program with it
                self._end(-signal.SIGKILL)
            case _:
                self.refusal = text or "the fork server has ended"
                self._end(-signal.SIGKILL)
        return True

    def _end(self, code: int) -> None:
        self.returncode = code
        with suppress(OSError):
            self._connection.close()
