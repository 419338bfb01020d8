"""A fork server: a process that imports third-party modules once and forks Python programs that need them.

`pipeline.utils.forked_process` starts this file as a script, without the project on its path: it imports only the
standard library and the modules it is asked to import. A forked program imports the project's modules itself, from its
own `PYTHONPATH`, as a program that was started with exec does.

The server has stages, in order. Each stage imports its modules on top of those of the stage before it, in a process
forked from that stage's: small programs do not wait for torch, and what two stages need is imported once. A stage that
is not asked for in advance is made by its first request.

A stage forks a keeper per request, and the keeper forks the program. The keeper is the program's parent, in the
server's session. Guarantees for the program, as for one that `exec_shielded` starts:

- It leads its own session, and has exactly the environment, arguments, directory and streams of the request. A request
  that nests adds one variable: the address of a fork server below the program, which has the same modules.
- The scheduler's signals are blocked, and INT has Python's default action.
- It ends with its requester: the keeper kills its group and all descendants when the requester's connection closes. The
  kernel kills it if the keeper ends. The server's own end affects neither.
- The program's id stays reserved until the requester has read its exit code.

A stage forks only while it has one thread and CUDA is unused, since a fork breaks both; otherwise it refuses, and the
requester starts the program with exec. `CUDA_VISIBLE_DEVICES` is thus set before CUDA is initialized.
"""

import array
import ctypes
import gc
import importlib
import json
import os
import random
import re
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHIELDED = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
MAX_MESSAGE = 1 << 20
VARIABLE = "ROLLCALL_FORK_SERVER"
"""The address of the fork server that a process may use."""
REST_SECONDS = 2.0
"""Time for the kernel to end the killed descendants of a program that has ended."""
_REST_PAUSE = 0.005
_STREAMS = 3
_CUDA_NOT_INITIALIZED = 3
"""`CUDA_ERROR_NOT_INITIALIZED`: the result of every call of the driver's API before `cuInit`."""


_set_by_imports: dict[str, str] = {}
"""Environment variables that the imported modules have set, as they would in the program."""


@dataclass
class Stage:
    """Modules to import, and environment variables that they read when they are imported."""

    name: str
    modules: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """A program to fork: a module (`-m NAME`) or a script, with its arguments, environment and streams."""

    stage: str
    argv: list[str]
    """The interpreter, its flags, then `-m MODULE` or a script, and the arguments: the program's command line."""
    environment: dict[str, str]
    directory: str
    nests: bool
    """Whether the program gets its own fork server (`VARIABLE`), whose programs are below it in the process tree."""
    connection: socket.socket
    streams: list[int]

    def close(self) -> None:
        self.connection.close()
        for stream in self.streams:
            os.close(stream)


class Server:
    """One stage's process, and the connection to the next stage's process if there is one."""

    def __init__(self, stages: list[Stage], source: socket.socket, *, listens: bool) -> None:
        self._stage, self._later = stages[0], stages[1:]
        self._source, self._listens = source, listens
        self._next: socket.socket | None = None
        self._refusal = ""

    def serve(self, ready: int) -> Request:
        """Serve requests. Returns in each forked program, with its request; never in the server.

        `ready` is the number of later stages that are made at once.
        """
        _import(self._stage.modules, self._stage.variables)
        self._refusal = _reason_against_fork()
        signal.signal(signal.SIGCHLD, _reap)  # rather than SIG_IGN, which would drop their CPU time from all accounts
        if ready and self._later and (request := self._make_next(ready - 1)):
            return request
        while True:
            request = self._receive()
            if request is None:
                continue
            if request.stage != self._stage.name and self._later:
                if self._next is None and (nested := self._make_next(0, request)):
                    return nested
                self._pass_on(request)
            elif (program := self._fork(request)) is not None:
                return program

    def _receive(self) -> Request | None:
        """The next request; None for one that is broken or whose requester has gone."""
        if not self._listens:
            return _read_request(self._source, passed_on=True)
        with suppress(OSError):
            connection, _ = self._source.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(credentials[4:8], sys.byteorder) == os.geteuid():
                return _read_request(connection, passed_on=False)
            connection.close()
        return None

    def _make_next(self, ready: int, waiting: Request | None = None) -> Request | None:
        """Fork the next stage's process. Returns in a program forked there, with its request; None in this one.

        The new process does not keep the descriptors of `waiting`, the request that this one is about to pass on:
        neither the requester nor who reads the program's output would see their ends.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork():
            theirs.close()
            self._next = ours
            return None
        ours.close()
        self._source.close()
        if waiting is not None:
            waiting.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with(parent)
        return Server(self._later, theirs, listens=False).serve(ready)

    def _pass_on(self, request: Request) -> None:
        descriptors = array.array("i", [request.connection.fileno(), *request.streams])
        fields = [request.stage, request.argv, request.environment, request.directory, request.nests]
        try:
            assert self._next is not None
            self._next.sendmsg([json.dumps(fields).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        except OSError as error:  # the next stage has ended
            _answer(request.connection, f"refused {error}")
        request.close()

    def _fork(self, request: Request) -> Request | None:
        """Fork the keeper, which forks the program. Returns in the program; None in the server."""
        if self._refusal or _is_closed(request.connection):
            _answer(request.connection, f"refused {self._refusal}")
            request.close()
            return None
        gc.freeze()  # what was imported is no garbage, and an untouched page stays shared
        if os.fork():
            request.close()
            return None
        self._source.close()
        if self._next is not None:
            self._next.close()
        return _keep(request)


def _import(modules: Sequence[str], variables: Mapping[str, str]) -> None:
    """Import what is installed of these. A broken module fails in the program that needs it, with its log."""
    os.environ.update(variables)
    before = dict(os.environ)
    gc.disable()
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    _set_by_imports.update((name, value) for name, value in os.environ.items() if before.get(name) != value)


_NVML_THREAD = re.compile(r"cuda[0-9a-f]{6,11}")
"""The name of the thread that NVML has the driver start, as vLLM calls `nvmlInit` when it is imported. A forked process
lacks it and misses nothing: it initializes the driver itself. vLLM forks its engine's process in this state too."""


def _reason_against_fork() -> str:
    """Why this process must not fork a program; empty if it may."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    names = sorted((task / "comm").read_text().strip() for task in tasks)
    if names := [name for name in names if not _NVML_THREAD.fullmatch(name)]:
        return f"the imported modules have started threads: {', '.join(names)}"
    if driver_is_initialized():
        return "the imported modules have initialized CUDA"
    return ""


def driver_is_initialized(driver: Any = None) -> bool:
    """Whether this process has called `cuInit`, as a count of devices does, which `torch.cuda.is_initialized` omits.

    `driver` is libcuda, by default the machine's; False without one. The question itself initializes nothing.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALIZED


def _read_request(source: socket.socket, *, passed_on: bool) -> Request | None:
    """Read a request from a client's connection, or one that an earlier stage has passed on."""
    size = array.array("i").itemsize * (_STREAMS + 1)
    try:
        data, ancillary, _, _ = source.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(size))
    except OSError:
        data, ancillary = b"", []
    if not data and passed_on:
        os._exit(0)  # the stage before this one has ended
    descriptors = array.array("i")
    for _level, _kind, content in ancillary:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    expected = _STREAMS + passed_on
    if not data or len(descriptors) != expected:
        for descriptor in descriptors:
            os.close(descriptor)
        if not passed_on:
            source.close()
        return None
    connection = socket.socket(fileno=descriptors[0]) if passed_on else source
    stage, argv, environment, directory, nests = json.loads(data)
    return Request(stage, argv, environment, directory, nests, connection, list(descriptors[passed_on:]))


def _keep(request: Request) -> Request:
    """The keeper: fork the program, report its id and exit code, and end it with its requester.

    Returns in the program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, 0)  # the server may end first
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent, began = os.getpid(), os.pipe()
    program = os.fork()
    if not program:
        os.close(began[0])
        os.setsid()
        _die_with(parent)
        os.close(began[1])
        return request
    os.close(began[1])
    os.read(began[0], 1)  # until the program leads its session: a signal to the group then reaches it
    for stream in request.streams:
        os.close(stream)
    _answer(request.connection, f"pid {program}")
    return _watch(program, request)


def _watch(program: int, request: Request) -> NoReturn:
    """Wait for the end of the program, which is reported, and for that of the connection, which ends this process."""
    ended = os.pidfd_open(program)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(request.connection, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if request.connection.fileno() in ready:
            break
        if ended in ready:
            poller.unregister(ended)
            status = _kill_rest(program)
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            _answer(request.connection, f"exit {code}")
    _kill_rest(program)
    os.waitpid(program, 0)
    os._exit(0)


def _kill_rest(program: int) -> "os.waitid_result":
    """Kill the program's group, and then all descendants that this process adopts. Returns how the program ended.

    A descendant that the kernel does not end within `REST_SECONDS`, such as one that waits for a device or a file
    server, is left, since the requester must learn of the program's end.
    """
    os.killpg(program, signal.SIGKILL)
    status = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    assert status is not None
    until = time.monotonic() + REST_SECONDS
    for _ in range(64):  # an end makes this process the parent of the next generation
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        left = [pid for pid in map(int, children) if pid != program]
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Those that have already ended are reaped too: they would be the agent's zombies for the rest of the run.
        for pid in left:
            while not _has_been_reaped(pid):
                if time.monotonic() > until:
                    return status
                time.sleep(_REST_PAUSE)
    return status


def _has_been_reaped(pid: int) -> bool:
    """Reap a child if it has ended; whether it is gone."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    return True


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _nest(request: Request, folder: Path) -> Request:
    """Fork a server below the program. Returns in the program, and in each program that this server forks."""
    parent, address = os.getpid(), folder / str(os.getpid())
    source = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source.bind(str(address))
    source.listen()
    if os.fork():
        source.close()
        request.environment[VARIABLE] = str(address)
        return request
    _die_with(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*SHIELDED, signal.SIGINT})  # INT is for the program, in the same group
    request.close()
    return Server([Stage("", [])], source, listens=True).serve(0)


def _become(request: Request, folder: Path) -> None:
    """Turn this forked process into the requested program, and run it."""
    while request.nests:
        nested = _nest(request, folder)
        if nested is request:
            break
        request = nested
    request.connection.close()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    before = _python_path(os.environ)
    os.environ.clear()
    os.environ.update(_set_by_imports | request.environment)
    os.chdir(request.directory)
    gc.enable()
    _show_command(request.argv)
    _renew_state(request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, SHIELDED)
    sys.orig_argv = list(request.argv)
    program = request.argv[1:]
    while program[0].startswith("-") and program[0] != "-m":
        program = program[1:]
    own = _python_path(request.environment)
    sys.path[:] = own + [entry for entry in sys.path if entry not in {*own, *before}]
    importlib.invalidate_caches()
    sys.modules["__main__"] = types.ModuleType("__main__")
    warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _renew_state(environment: dict[str, str]) -> None:
    """Replace what modules have read from the environment, or drawn at random, when they were imported."""
    tempfile.tempdir = None
    random.seed()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    hub: Any = sys.modules.get("huggingface_hub.constants")
    if hub is not None:
        hub.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None:
        dynamo.disable = environment.get("TORCH_COMPILE_DISABLE", "0") == "1"
    torch: Any = sys.modules.get("torch")
    threads = environment.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdecimal():
        torch.set_num_threads(int(threads))


def _show_command(argv: list[str]) -> None:
    """Write the program's arguments over this process's, which /proc and ps show. What does not fit is left out.

    The last byte is not zero, so the kernel takes the arguments for one text, up to the first zero.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = " ".join(argv).encode()[: end - start - 2]
    ctypes.memmove(start, text.ljust(end - start - 1, b"\0") + b".", end - start)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _is_closed(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))  # a requester sends nothing more


def _answer(connection: socket.socket, text: str) -> None:
    with suppress(OSError):
        connection.send(text.encode())


def _remove_with_parent(folder: Path, parent: int) -> None:
    """End this process with its parent, and remove its folder first."""

    def end(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGINT, end)
    _prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        end()


def main() -> None:
    """`fork_server.py FOLDER PARENT SOCKET STAGES READY PADDING`.

    `SOCKET` is the descriptor of a socket that listens in `FOLDER`, in which requests queue from the start; see
    `Server.serve` for `READY`; `PADDING` is room for the arguments of forked programs.
    """
    folder, parent, stages, ready = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[4]), int(sys.argv[5])
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    _remove_with_parent(folder, parent)
    source = socket.socket(fileno=int(sys.argv[3]))
    _show_command([sys.executable, "fork server"])
    _become(Server([Stage(**stage) for stage in stages], source, listens=True).serve(ready), folder)


if __name__ == "__main__":
    main()
