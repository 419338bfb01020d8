"""The first process of a sandbox: it runs the policy's code in a child, watches all processes, and ends them.

Owns a sandbox from the start of its first process to its end: the working directory, the limits of the code's
processes, the loss of all privileges, and the memory of all processes together. Promises that every process of the
sandbox ends with the code, with the worker that started it, and when all use more memory than permitted. Nothing in the
sandbox can kill, stop or trace it, because it is process 1 of the PID namespace and cannot be dumped.

A script that uses only the standard library of Python 3.9, because it also runs in images. `sandbox_jail` starts it
after its own set-up; other kinds run `sandbox_guard.py FILES WORKDIR LEASE STARTED BOUNDS CODE`. The files in FILES are
copied to WORKDIR. LEASE is a FIFO that the worker has open for as long as the sandbox may run, or an empty text. A byte
in the FIFO STARTED, if there is one, shows the worker that the code begins.

Between two looks, `LOOK_SECONDS` apart, memory is not bounded as a whole: then only the kernel's limits of a process
hold (docs/security.md).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from functools import cmp_to_key
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
SIGNALED = 128
"""A code that a signal ended makes the guard exit with this and the signal's number: process 1 cannot signal itself."""
OUT_OF_MEMORY, OUT_OF_PROCESSES, OUT_OF_TIME = 201, 202, 203
"""Exit codes of the guard when it ended the sandbox. A program that exits with one of them gets that reason."""
LOOK_SECONDS = 0.05
_PRIVATE, _NOT_PAGES = ("RssAnon", "VmSwap", "VmPTE", "HugetlbPages"), ("VmSwap", "VmPTE", "HugetlbPages")
"""Sizes of a process in /proc/PID/status without files: all, and those that its PSS does not include."""
_SHARED_MEMORY = ("/memfd:", "/dev/zero ", "/anon_hugepage ")
"""Names in /proc/PID/maps of files of `memfd_create`, and of what mmap(2) shares without a file."""
_MEASUREMENTS = 3
"""Measurements, one right after the other, that must exceed the limit. A program that starts another has both at once
for a moment, and of processes that come and go, whose ids are soon used again, no measurement is of one moment."""
_SYS_KCMP, _KCMP_VM, _KCMP_GREATER = {"x86_64": 312, "aarch64": 272}, 1, 2
MAX_PROCESSES = 301
"""Processes, with threads, at which the guard ends the sandbox where the kernel refuses none: root's, in some kinds."""
_OWN_PROCESS_COUNT = (5, 14)
"""Kernel version since which RLIMIT_NPROC counts per user namespace; before, it counts those of the whole machine."""

FileSizes = dict[tuple[int, int], int]
"""Bytes of files in memory, by device and inode."""


class Bounds(NamedTuple):
    """Limits of a sandbox: wall-clock seconds of the whole, CPU seconds of a process, bytes of memory of a process and
    of all together, processes, bytes of a file, open files of a process."""

    seconds: int
    cpu_seconds: int
    memory_bytes: int
    processes: int
    file_bytes: int
    files: int

    @property
    def text(self) -> str:
        """For the command line; `parse_bounds` reads it."""
        return ",".join(map(str, self))


def parse_bounds(text: str) -> Bounds:
    """The bounds of a command line."""
    return Bounds(*map(int, text.split(",")))


def end_with_parent() -> None:
    """Have this process killed when its parent ends."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot request a signal at the parent's end")


def limit_process(bounds: Bounds) -> None:
    """Limit this process and those that it starts, each by itself."""
    for what, limit in (
        (resource.RLIMIT_CPU, bounds.cpu_seconds),
        (resource.RLIMIT_DATA, bounds.memory_bytes),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_NOFILE, bounds.files),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (bound, bound))


def open_started(path: str) -> int | None:
    """The FIFO in which a byte shows that the code begins; None for an empty path."""
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK) if path else None


def run_guarded(
    workdir: str, bounds: Bounds, code: str, started: int | None = None, lease: int | None = None
) -> NoReturn:
    """Run `code` in `workdir` and exit as it does. `started`: see `open_started`. `lease`: a file descriptor that is at
    its end once the worker is gone."""
    if os.getpid() != 1:
        raise RuntimeError("the guard must be the first process of a PID namespace")
    if _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot prevent tracing")
    os.chdir(workdir)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGINT})
    child = os.fork()
    if child:
        if started is not None:
            os.write(started, b"1")
            os.close(started)
        _guard(child, bounds, lease)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGINT})
    if lease is not None:
        os.close(lease)
    limit_process(bounds)
    if kernel() >= _OWN_PROCESS_COUNT:
        resource.setrlimit(resource.RLIMIT_NPROC, (bounds.processes, bounds.processes))
    _drop_privileges()
    environment = {**os.environ, "HOME": workdir, "TMPDIR": workdir}
    os.execve(sys.executable, [sys.executable, "-I", "-c", code], environment)


def _guard(child: int, bounds: Bounds, lease: int | None) -> NoReturn:
    """Exit as the process `child` does, or when a bound is exceeded; all others then end too."""
    until, limit = time.monotonic() + bounds.seconds, bounds.memory_bytes
    mapped: FileSizes = {}
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_SECONDS)
        result = _result(child)
        if result is not None:
            os._exit(result if result >= 0 else SIGNALED - result)
        if time.monotonic() > until or _is_closed(lease):
            os._exit(OUT_OF_TIME)
        if sum(map(len, _processes())) > MAX_PROCESSES:
            os._exit(OUT_OF_PROCESSES)
        if all(used_bytes(_processes(), limit, mapped) > limit for _ in range(_MEASUREMENTS)):
            os._exit(OUT_OF_MEMORY)


def _result(child: int) -> int | None:
    """The exit code of `child`, negative for a signal, or None while it runs. Reaps all others."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            return None


def _is_closed(lease: int | None) -> bool:
    """Whether the lease has no writer, also if it had none when it was opened, which poll(2) does not report."""
    if lease is None:
        return False
    try:
        return not os.read(lease, 1)
    except BlockingIOError:
        return False


def _processes() -> list[list[str]]:
    """The threads of each process except this one, the main thread first, also if it has ended before others."""
    processes = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                processes.append(sorted((thread.name for thread in (path / "task").iterdir()), key=int))
    return [threads for threads in processes if threads and threads[0] != "1"]


def used_bytes(processes: list[list[str]], enough: int, seen: FileSizes) -> int:
    """Bytes of memory that the processes use together, each given by its threads; 0 without a /proc.

    Private memory is counted by process: what is resident or swapped out, and its page tables. If the sum exceeds
    `enough`, pages that processes share since a fork are counted in proportion (PSS), and an address space that two
    processes have in common counts once. Shared memory is counted by file, because its pages need not be resident in
    any process, and a file keeps those that are no longer mapped: `seen` has the sizes of the measurement before and
    gets those of this one. Pages of other files are not counted: the kernel can drop them, or a file system's size
    bounds them.
    """
    mapped: FileSizes = {}
    opened: FileSizes = {}
    private: dict[str, int] = {}
    for threads in processes:
        thread, status = _status(threads)
        private[thread] = sum(status.get(name, 0) for name in _PRIVATE)
        for file, size in _mapped_files(thread).items():
            mapped[file] = max(size, mapped.get(file, 0), seen.get(file, 0))
        for number in threads:
            opened.update(_open_files(number))
    seen.clear()
    seen.update(mapped)
    shared = sum({**mapped, **opened}.values()) + _segment_bytes()
    if shared + sum(private.values()) <= enough:
        return shared + sum(private.values())
    return shared + sum(map(_proportional_bytes, _address_spaces(list(private))))


def _status(threads: list[str]) -> tuple[str, dict[str, int]]:
    """The first thread that has not ended, and the sizes of its process; none if all have ended."""
    for thread in threads:
        sizes = _kilobytes(f"/proc/{thread}/status")
        if "VmSize" in sizes:
            return thread, sizes
    return threads[0], {}


def _proportional_bytes(thread: str) -> int:
    _, status = _status([thread])  # again: the process may have ended, or started a program
    rollup = _kilobytes(f"/proc/{thread}/smaps_rollup")
    resident = rollup.get("Pss_Anon", rollup.get("Pss", status.get("RssAnon", 0)))
    return resident + sum(status.get(name, 0) for name in _NOT_PAGES)


def _kilobytes(path: str) -> dict[str, int]:
    """The sizes in bytes of a file of /proc with lines such as `VmRSS:  12 kB`."""
    sizes = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdecimal():  # a process may be called `x kB`
            sizes[name] = int(number) << 10
    return sizes


def _lines(path: str) -> list[str]:
    """The lines of a file of /proc; none of a process that has ended. The names of processes and files in it are any
    bytes except a line feed, also those at which `str.splitlines` ends a line."""
    with suppress(OSError):
        return Path(path).read_bytes().decode(errors="replace").split("\n")
    return []


def _address_spaces(threads: list[str]) -> list[str]:
    """One of the threads for each address space. A child of vfork has that of its parent until it starts a program."""
    number = _SYS_KCMP.get(os.uname().machine)
    if number is None:
        return threads

    def compare(one: str, other: str) -> int:
        order = _LIBC.syscall(number, int(one), int(other), _KCMP_VM, 0, 0)
        return order if order < _KCMP_GREATER else -1

    key = cmp_to_key(compare)
    return [next(alike) for _, alike in groupby(sorted(threads, key=key), key=key)]


def _mapped_files(thread: str) -> FileSizes:
    """Bytes of shared memory without a name, up to the end of what is mapped, by device and inode. Its pages stay when
    they are mapped and no longer resident, also after its file was closed."""
    ends: FileSizes = {}
    for line in _lines(f"/proc/{thread}/maps"):
        if "(deleted)" not in line:
            continue
        area, _, offset, device, inode, path = line.split(maxsplit=5)
        if path.startswith(_SHARED_MEMORY):
            begin, end = (int(number, 16) for number in area.split("-"))
            major, minor = (int(number, 16) for number in device.split(":"))
            file = os.makedev(major, minor), int(inode)
            ends[file] = max(ends.get(file, 0), int(offset, 16) + end - begin)
    return ends


def _open_files(thread: str) -> FileSizes:
    """Bytes of the open files of `memfd_create`, by device and inode. A thread may have its own open files."""
    sizes = {}
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{thread}/fd"):
            with suppress(OSError):
                if str(Path(entry).readlink()).startswith("/memfd:"):
                    status = os.stat(entry.path)
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes


def _segment_bytes() -> int:
    """Bytes of the shared memory segments of System V, resident or swapped out."""
    with suppress(OSError, ValueError):
        header, *lines = Path("/proc/sysvipc/shm").read_text().splitlines()
        columns = [header.split().index(name) for name in ("rss", "swap")]
        return sum(int(line.split()[column]) for line in lines for column in columns)
    return 0


def _drop_privileges() -> None:
    """Drop all privileges for good, so that the code cannot undo the mounts."""
    capability = 0
    while not _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
        capability += 1
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()) or _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot drop privileges")


def kernel() -> tuple[int, int]:
    """The version of the running kernel."""
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int(minor)


def main(files: str, workdir: str, lease: str, started: str, bounds: str, code: str) -> None:
    """Run `code` in a sandbox that another program has set up."""
    for entry in os.scandir(files):
        Path(workdir, entry.name).write_bytes(Path(entry.path).read_bytes())
    number = os.open(lease, os.O_RDONLY | os.O_NONBLOCK) if lease else None
    run_guarded(workdir, parse_bounds(bounds), code, open_started(started), number)


if __name__ == "__main__":
    main(*sys.argv[1:])
