"""The programs that can isolate code of the policy, each as the command line that runs a guard in a sandbox.

| `task.sandbox.kind` | program | root file system |
|---|---|---|
| `namespaces` | `unshare` of util-linux | that of `sandbox_jail`: programs and Python of the machine |
| `bubblewrap` | `bwrap` | the same, or the directory `task.sandbox.image` |
| `podman` | `podman` | `task.sandbox.image`: an image, or a directory |
| `apptainer` | `apptainer` | `task.sandbox.image`: a SIF file, or a directory |

None needs root. In each the guard (`sandbox_guard`) is process 1 of a PID namespace and bounds the code, so a kind
gives only the view of the machine: no network, no other process, no file except a read-only root and file systems in
memory of bounded size.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from pipeline.environments import sandbox_guard, sandbox_jail
from pipeline.environments.sandbox_guard import Bounds

_NAMESPACES = ("--user", "--map-root-user", "--net", "--ipc", "--pid", "--mount")
_UNSHARE = ("unshare", *_NAMESPACES, "--fork", "--kill-child")
_INSIDE = "/run/sandbox"
"""Directory of a container with the guard, the files of the code, and the lease."""
_GUARD, _FILES, _LEASE, _STARTED = (f"{_INSIDE}/{name}" for name in ("guard.py", "files", "lease", "started"))
_WORKDIR = "/tmp"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_USER_PROCESSES = 1 << 14
"""Limit of podman itself for all processes of the user; the guard sets that of the code."""
REMOVE_SECONDS = 60.0
_OPTION_VARIABLES = ("APPTAINER", "SINGULARITY")
"""Beginnings of variables that are options of apptainer, such as APPTAINER_BIND, or variables of its container."""
_DIRECTORY_VARIABLES = frozenset(
    f"{program}_{name}" for program in _OPTION_VARIABLES for name in ("CACHEDIR", "CONFIGDIR", "TMPDIR")
)


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is to hold: the directory with the files of its code, its limits, the bytes of its file system in
    memory, and directories of its root that are writable. `lease` is a FIFO whose end shows the guard that the worker
    is gone, and `started` one in which a byte shows the worker that the code begins."""

    files: str
    bounds: Bounds
    disk_bytes: int
    directories: tuple[str, ...] = ()
    lease: str = ""
    started: str = ""


class SandboxKind(Protocol):
    """A way to run a guard in a sandbox. `image` may be empty unless `needs_image`."""

    program: str
    needs_image: bool
    takes_image: bool
    outlives_worker: bool
    """Whether the sandbox is no descendant of the program, so that it ends by its lease."""
    hint: str
    """What to do where it does not run."""

    def command(self, spec: SandboxSpec, image: str) -> list[str]:
        """The command that runs the Python code appended to it in a new sandbox, and exits as `sandbox_guard` does."""
        ...

    def remove(self, spec: SandboxSpec) -> None:
        """Remove what is left of a sandbox whose command was killed."""
        ...


class Namespaces:
    """Namespaces of `unshare`, set up by `sandbox_jail`."""

    program, needs_image, takes_image, outlives_worker = "unshare", False, False, False
    hint = "ask for unprivileged user namespaces and mounts"

    def command(self, spec: SandboxSpec, image: str) -> list[str]:
        jail = (sys.executable, "-I", "-S", sandbox_jail.__file__)
        return [*_UNSHARE, *jail, spec.files, str(spec.disk_bytes), spec.started, spec.bounds.text, *spec.directories]

    def remove(self, spec: SandboxSpec) -> None:
        """Nothing: the kernel ends a namespace with its process 1."""


class Bubblewrap:
    """`bwrap`, which mounts the same root as `sandbox_jail`, or the entries of a directory."""

    program, needs_image, takes_image, outlives_worker = "bwrap", False, True, False
    hint = "install bubblewrap 0.8 or later, and ask for unprivileged user namespaces"

    def command(self, spec: SandboxSpec, image: str) -> list[str]:
        workdir = _WORKDIR if image else sandbox_jail.working_directory(spec.files)
        python = ("--setenv", "PATH", _PATH, "python3") if image else (sys.executable,)
        return [
            *("bwrap", "--unshare-user", "--unshare-net", "--unshare-ipc", "--unshare-pid", "--unshare-uts"),
            # As root of its namespace the guard may look into processes that made themselves undumpable.
            *("--uid", "0", "--gid", "0", "--disable-userns", "--die-with-parent", "--as-pid-1"),
            *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_PTRACE", "--cap-add", "CAP_SETPCAP"),
            *(_image_mounts(image) if image else _machine_mounts()),
            *("--proc", "/proc", "--dir", "/dev"),
            *(word for device in sandbox_jail.DEVICES for word in ("--dev-bind", device, device)),
            *(word for path in dict.fromkeys((workdir, *spec.directories)) for word in _memory(path, spec)),
            *("--symlink", workdir, "/dev/shm"),
            *(() if image else ("--symlink", workdir, "/var/tmp")),
            *("--ro-bind", sandbox_guard.__file__, _GUARD, "--ro-bind", spec.files, _FILES),
            *(("--ro-bind", spec.started, _STARTED) if spec.started else ()),
            *("--remount-ro", "/", "--chdir", "/"),
            *python,
            *_guard_arguments(spec, workdir),
        ]

    def remove(self, spec: SandboxSpec) -> None:
        """Nothing: the kernel ends a namespace with its process 1."""


class Podman:
    """`podman`, without its own cgroups: the processes stay in the cgroup of the job, which Slurm bounds."""

    program, needs_image, takes_image, outlives_worker = "podman", True, True, True
    hint = (
        "install podman 4 or later with crun, and pull the image on each node (podman pull), or name an unpacked "
        "directory; the image needs python3 3.9 or later"
    )

    def command(self, spec: SandboxSpec, image: str) -> list[str]:
        # podman's default is higher than what an unprivileged process may set.
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        processes = _USER_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _USER_PROCESSES)
        return [
            *("podman", "run", "--rm", "--interactive", "--name", _name(spec), "--pull", "never"),
            *("--network", "none", "--no-hosts", "--read-only", "--read-only-tmpfs=false", "--cgroups", "disabled"),
            *("--cap-drop", "all", "--cap-add", "sys_ptrace", "--cap-add", "setpcap"),
            *("--security-opt", "no-new-privileges", "--security-opt", "label=disable", "--log-driver", "none"),
            *("--ulimit", f"nofile={spec.bounds.files}", "--ulimit", f"nproc={processes}"),
            *("--timeout", str(spec.bounds.seconds + int(REMOVE_SECONDS)), "--shm-size", str(spec.disk_bytes)),
            *(word for path in dict.fromkeys((_WORKDIR, *spec.directories)) for word in self._memory(path, spec)),
            *_bind("--volume", spec),
            *("--env-host=false", "--http-proxy=false", "--env", "OMP_NUM_THREADS=1"),
            *("--workdir", "/", "--entrypoint", "python3"),
            *(("--rootfs", image) if Path(image).is_dir() else (image,)),
            *_guard_arguments(spec, _WORKDIR),
        ]

    def remove(self, spec: SandboxSpec) -> None:
        command = ["podman", "rm", "--force", "--time", "0", "--ignore", _name(spec)]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=REMOVE_SECONDS, check=False)

    def _memory(self, path: str, spec: SandboxSpec) -> tuple[str, str]:
        return "--tmpfs", f"{path}:rw,nosuid,nodev,exec,size={spec.disk_bytes},mode=1777"


class Apptainer:
    """`apptainer exec` in a user namespace. Its file systems in memory have the size of `sessiondir max size`, which
    the administrator sets (64 MiB by default)."""

    program, needs_image, takes_image, outlives_worker = "apptainer", True, True, True
    hint = (
        "install apptainer, or load its module, and ask for unprivileged user namespaces; the image is a .sif file or "
        "an unpacked directory on all nodes, with python3 3.9 or later"
    )

    def command(self, spec: SandboxSpec, image: str) -> list[str]:
        return [
            *("apptainer", "--silent", "exec", "--userns", "--containall", "--cleanenv", "--no-home", "--no-init"),
            *("--net", "--network", "none", "--no-privs", "--env", "OMP_NUM_THREADS=1", "--pwd", "/"),
            *(word for path in spec.directories for word in ("--scratch", path)),
            *_bind("--bind", spec),
            *(image, "python3", *_guard_arguments(spec, _WORKDIR)),
        ]

    def remove(self, spec: SandboxSpec) -> None:
        """Nothing: apptainer has no record of a container, and its guard ends with the lease."""


KINDS: dict[str, SandboxKind] = {
    "namespaces": Namespaces(),
    "bubblewrap": Bubblewrap(),
    "podman": Podman(),
    "apptainer": Apptainer(),
}


def client_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that starts containers, from that of the worker. Options of the user's own
    containers, such as mounts that a module of the cluster sets, must not apply to the policy's."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_OPTION_VARIABLES) or name in _DIRECTORY_VARIABLES
    }


def _name(spec: SandboxSpec) -> str:
    return f"rollcall-{Path(spec.files).parent.name}"


def _guard_arguments(spec: SandboxSpec, workdir: str) -> list[str]:
    return [
        "-I",
        "-S",
        _GUARD,
        _FILES,
        workdir,
        _LEASE if spec.lease else "",
        _STARTED if spec.started else "",
        spec.bounds.text,
    ]


def _bind(option: str, spec: SandboxSpec) -> Iterator[str]:
    """Read-only mounts of what the guard needs."""
    fifos = (spec.lease, _LEASE), (spec.started, _STARTED)
    for source, target in ((sandbox_guard.__file__, _GUARD), (spec.files, _FILES), *fifos):
        if source:
            yield from (option, f"{source}:{target}:ro")


def _memory(path: str, spec: SandboxSpec) -> tuple[str, ...]:
    return "--perms", "0700", "--size", str(spec.disk_bytes), "--tmpfs", path


@cache
def _machine_mounts() -> tuple[str, ...]:
    """Mounts of the paths of this machine that code may see. Another process lists them, since this one may have loaded
    libraries from anywhere."""
    command = [sys.executable, "-I", "-S", sandbox_jail.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=REMOVE_SECONDS, check=True).stdout
    words: list[str] = []
    for path in map(Path, listed.split("\0")):
        if path.is_symlink() and str(path) in sandbox_jail.SYSTEM:
            words += ["--symlink", str(path.readlink()), str(path)]
        else:
            words += ["--ro-bind", str(path), str(path)]
    return tuple(words)


def _image_mounts(image: str) -> Iterator[str]:
    """Mounts of the entries of a directory, as a root: then directories can be added to the root itself."""
    for entry in sorted(os.scandir(image), key=lambda entry: entry.name):
        if entry.name in ("dev", "proc", "run", "sys", "tmp"):
            continue
        if entry.is_symlink():
            yield from ("--symlink", str(Path(entry).readlink()), f"/{entry.name}")
        else:
            yield from ("--ro-bind", entry.path, f"/{entry.name}")
