"""The set-up of a sandbox in namespaces that `unshare` created, before its guard starts the policy's code.

Owns the view of the machine that such code has. Its root has the system's programs and libraries, the Python
installation and a few devices, and no other file or Unix socket of the machine. All of it is read-only except one
filesystem of bounded size in memory, which is its working directory, /tmp and /dev/shm; /proc shows only its own
processes; and it lacks the privileges to undo any of this. Promises to raise if any step fails. Process 1 of the
namespace is not the code but its guard (`sandbox_guard`), so all processes end with `unshare`, whatever the code does.
A script that uses only the standard library, which `sandbox_kinds` runs as `sandbox_jail.py FOLDER BYTES STARTED
BOUNDS [DIRECTORY …] CODE`. The files in FOLDER are copied to the working directory of CODE. STARTED is that of
`sandbox_guard`. Each DIRECTORY, such as /app, is
writable, on the same filesystem of bounded size. Without arguments it prints the paths that such a root shows.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MNT_DETACH = 16384, 2
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
_MIN_PID_MAX = 301
"""The smallest value that the kernel accepts."""
SHARED = ("/dev/shm", "/var/tmp")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store")
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_ETC_NAMES = ("alternatives", "group", "ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "passwd")
_ETC = tuple(f"/etc/{name}" for name in _ETC_NAMES)
_OWN_PID_MAX = (6, 14)
"""Kernel version since which pid_max belongs to a PID namespace; before, it is that of the whole machine."""


def isolate(folder: str, disk_bytes: int, processes: int, kernel: tuple[int, int], directories: Sequence[str]) -> str:
    """Give this process its own root, and return the working directory, which then has the files of `folder`."""
    if os.getpid() != 1:
        raise RuntimeError("the jail must be the first process of a PID namespace")
    files = {entry.name: Path(entry).read_bytes() for entry in os.scandir(folder)}
    # Only of this user namespace. Where /proc/sys is read-only, a new user namespace needs privileges anyway.
    with suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    if kernel >= _OWN_PID_MAX:
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(max(processes, _MIN_PID_MAX)))
    workdir = working_directory(folder)
    _build_root(folder, workdir, directories)
    make_read_only()  # before the old root goes, whose /proc names the mounts
    _enter_root(folder)
    _mount(
        "tmpfs", workdir, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes={disk_bytes >> 12},mode=700"
    )
    for shared in SHARED:
        _mount(workdir, shared, "", _MS_BIND)
    for directory in directories:
        Path(workdir + directory).mkdir(parents=True)
        _mount(workdir + directory, directory, "", _MS_BIND)
    for name, content in files.items():
        Path(workdir, name).write_bytes(content)
    return workdir


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


def working_directory(folder: str) -> str:
    """/tmp, so that programs which write to /tmp work; `folder` if Python itself is installed below /tmp."""
    prefixes = (sys.base_prefix, sys.executable, os.path.realpath(sys.executable))
    return folder if any(Path(prefix).is_relative_to("/tmp") for prefix in prefixes) else "/tmp"


def _build_root(root: str, workdir: str, directories: Sequence[str]) -> None:
    """Mount the root of the code at `root`: what the code may see, and empty directories to mount on."""
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for directory in (workdir, "/proc", *SHARED, *directories):
        Path(root + directory).mkdir(parents=True, exist_ok=True)
    for path in (*shown_paths(), *filter(Path.exists, map(Path, DEVICES))):
        _show(path, Path(f"{root}{path}"))
    _mount_processes(f"{root}/proc")


def shown_paths() -> list[Path]:
    """The paths of the machine that the code may read, none below another."""
    shown: list[Path] = []
    for path in map(Path, (*SYSTEM, *_ETC, *_python_paths())):
        if path.exists() and not any(path.is_relative_to(outer) for outer in shown):
            shown.append(path)
    return shown


def _python_paths() -> Iterator[str]:
    """The directories and files of this Python: its installation, its virtual environment, each link to it, and the
    directories of the libraries that it has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        library = line.partition("/")[2]
        if ".so" in library:
            yield str(Path(f"/{library}").parent)
    yield from {sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix)} - {"/"}
    program = Path(sys.executable)
    while True:
        environment = program.parent.parent
        # A link such as ~/bin/python must not show the whole home directory.
        yield str(environment if (environment / "pyvenv.cfg").exists() else program)
        if not program.is_symlink():
            return
        program = Path(os.path.normpath(program.parent / program.readlink()))


def _show(path: Path, target: Path) -> None:
    """Show `path` of the machine at `target`; a link of the top level, as /bin often is, stays a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() and str(path) in SYSTEM:
        target.symlink_to(path.readlink())
        return
    if path.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    # Recursive: an unprivileged process may not uncover what another mount covers.
    _mount(str(path), str(target), "", _MS_BIND | _MS_REC)


def _enter_root(root: str) -> None:
    """Make `root` the root of this mount namespace and detach the old one, as pivot_root(2) describes."""
    os.chdir(root)
    if _LIBC.pivot_root(b".", b".") or _LIBC.umount2(b".", _MNT_DETACH):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot change the root: {os.strerror(number)}", root)
    os.chdir("/")


def _mount_processes(target: str) -> None:
    """Mount a /proc of this PID namespace; an empty one where the kernel permits none, as in many containers."""
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _mount("proc", target, "proc", flags)
    except PermissionError:
        _mount("tmpfs", target, "tmpfs", flags, "size=4096")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount: {os.strerror(number)}", target)


def main(arguments: Sequence[str]) -> None:
    """Isolate this process and become the guard of the code; without arguments, print what the code would see."""
    if not arguments:
        print("\0".join(map(str, shown_paths())), end="")
        return
    folder, disk_bytes, started, bounds, *directories, code = arguments
    # The interpreter is isolated (-I), so it does not find the modules next to this script.
    sys.path.append(str(Path(__file__).parent))
    guard = importlib.import_module("sandbox_guard")
    limits, number = guard.parse_bounds(bounds), guard.open_started(started)
    workdir = isolate(folder, int(disk_bytes), limits.processes, guard.kernel(), directories)
    guard.run_guarded(workdir, limits, code, number)


if __name__ == "__main__":
    main(sys.argv[1:])
