"""The set-up of a sandboxed process before it becomes the policy's code, in namespaces that `unshare` created.

Owns the view of the machine that such code has. Every filesystem is read-only except one of bounded size in memory,
which is its working directory, /tmp and /dev/shm; /proc shows only its own processes; and it lacks the privileges to
undo any of this. Promises to raise if any step fails. A script that uses only the standard library, run as
`sandbox_jail.py FOLDER BYTES PROCESSES CODE` by `pipeline.environments.sandbox`. The files in FOLDER are copied to the
working directory of CODE.
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_LOCKED_FLAGS = {
    "nosuid": _MS_NOSUID,
    "nodev": _MS_NODEV,
    "noexec": _MS_NOEXEC,
    "noatime": 1 << 10,
    "nodiratime": 1 << 11,
    "relatime": 1 << 21,
}
"""Options that a remount must preserve: an unprivileged process may not clear them."""
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_MIN_PID_MAX = 301
"""The smallest value that the kernel accepts."""
_SHARED = ("/dev/shm", "/var/tmp")
_OWN_PROCESS_COUNT, _OWN_PID_MAX = (5, 14), (6, 14)
"""Kernel versions since which RLIMIT_NPROC counts per user namespace, and pid_max belongs to a PID namespace. Earlier
kernels apply both to the whole machine."""


def main(folder: str, disk_bytes: int, processes: int, code: str) -> None:
    """Isolate this process, then become `code`."""
    if os.getpid() != 1:
        raise RuntimeError("the jail must be the first process of a PID namespace")
    files = {entry.name: Path(entry).read_bytes() for entry in os.scandir(folder)}
    # Only of this user namespace. Where /proc/sys is read-only, a new user namespace needs privileges anyway.
    with suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    if _kernel() >= _OWN_PID_MAX:
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(max(processes, _MIN_PID_MAX)))
    make_read_only()
    workdir = _working_directory(folder)
    _mount(
        "tmpfs", workdir, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes={disk_bytes >> 12},mode=700"
    )
    for shared in filter(os.path.isdir, _SHARED):
        _mount(workdir, shared, "", _MS_BIND)
    _hide_processes()
    for name, content in files.items():
        Path(workdir, name).write_bytes(content)
    os.chdir(workdir)
    if _kernel() >= _OWN_PROCESS_COUNT:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    _drop_privileges()
    environment = {**os.environ, "HOME": workdir, "TMPDIR": workdir}
    os.execve(sys.executable, [sys.executable, "-I", "-c", code], environment)


def make_read_only(at_once: bool = True) -> None:
    """Make all mounts of this mount namespace read-only. Kernels before 5.12 need one call per mount."""
    attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY, 0, 0, 0)
    if at_once and not _LIBC.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
    ):
        return
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, _, _, target, options, *_ = line.split(" ")
        flags = sum(_LOCKED_FLAGS.get(option, 0) for option in options.split(","))
        with suppress(FileNotFoundError, NotADirectoryError):  # another mount covers this one
            _mount("", target.encode().decode("unicode_escape"), "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)


def _working_directory(folder: str) -> str:
    """/tmp, so that programs which write to /tmp work; `folder` if Python itself is installed below /tmp."""
    prefixes = (sys.base_prefix, sys.executable, os.path.realpath(sys.executable))
    return folder if any(Path(prefix).is_relative_to("/tmp") for prefix in prefixes) else "/tmp"


def _hide_processes() -> None:
    """Mount a /proc of this PID namespace; an empty one where the kernel permits none, as in many containers."""
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _mount("proc", "/proc", "proc", flags)
    except PermissionError:
        _mount("tmpfs", "/proc", "tmpfs", flags, "size=4096")


def _drop_privileges() -> None:
    """Drop all privileges, so that the code cannot undo the mounts."""
    capability = 0
    while not _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
        capability += 1
    if not capability or _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot drop privileges")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount: {os.strerror(number)}", target)


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int(minor)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
