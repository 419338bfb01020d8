"""Stand-ins for apptainer and enroot where neither is installed: real mount namespaces, no image formats.

Owns the part of both command lines that Rollcall writes. A container sees the files of its image, /proc, /sys, /dev and
the mounts of its command line, and nothing else of the host; with enroot it has only the variables of its command line.
Signals come as with the real ones: the command replaces the process of enroot; apptainer stays as its parent, forwards
signals, and clears the mask that it inherits. An image is a folder for apptainer and a tar file for enroot. Each call
is recorded, with one word a line, in `calls/` beside the programs.

    install(folder)        # <folder>/apptainer and <folder>/enroot
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

SYSTEM = ("/proc", "/sys", "/dev")
"""What every runtime mounts by itself; apptainer adds /tmp."""
ROOT = Path("/mnt")
"""Where the root of a container lies in its mount namespace, which nothing outside of it sees."""


def install(folder: Path, *names: str) -> Path:
    """Write the programs, `names` of them or both, into a folder for PATH."""
    folder.mkdir(parents=True)
    for name in names or ("apptainer", "enroot"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} {name} "$@"\n')
        program.chmod(0o755)
    return folder


def calls(folder: Path) -> list[list[str]]:
    """The words of every call, oldest first."""
    return [file.read_text().splitlines() for file in sorted((folder / "calls").glob("*"))]


def main(folder: Path, name: str, words: list[str]) -> None:
    (folder / "calls").mkdir(exist_ok=True)
    (folder / "calls" / f"{time.time_ns()}-{os.getpid()}").write_text("\n".join([name, *words]))
    if name == "inside":
        enter(words)
    elif name == "apptainer":
        apptainer(folder, words)
    else:
        enroot(folder, words)


def apptainer(folder: Path, words: Sequence[str]) -> None:
    assert words[0] == "exec", words
    mounts, rest = ["/tmp:/tmp"], list(words[1:])
    while rest[0].startswith("--"):
        option = rest.pop(0)
        value = rest.pop(0) if option in ("--bind", "--pwd") else ""
        assert option in ("--bind", "--pwd", "--no-home", "--nv"), f"FATAL: unknown flag: {option}"
        mounts += [value] if option == "--bind" else []
    image = Path(rest.pop(0))
    if not image.is_dir():
        sys.exit(f"FATAL:   could not open image {image}")
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(forward(child)))
    become(folder, image, mounts, rest, dict(os.environ))


def forward(child: int) -> int:
    """The status of the child at its end; it gets every signal that this process gets."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    return os.waitpid(child, 0)[1]


def enroot(folder: Path, words: list[str]) -> None:
    containers = folder / "containers"
    if words[0] == "create":
        _, force, _, name, image = words
        assert force == "--force"
        shutil.rmtree(containers / name, ignore_errors=True)
        try:
            with tarfile.open(image) as tar:
                tar.extractall(containers / name, filter="fully_trusted")
        except tarfile.ReadError:
            sys.exit(f"[ERROR] Invalid image format: {image}")
    elif words[0] == "remove":
        shutil.rmtree(containers / words[-1])
    else:
        assert words[0] == "start", words
        start(folder, words[1:])


def start(folder: Path, rest: list[str]) -> None:
    mounts, names, script = list[str](), list[str](), ""
    while rest[0].startswith("--"):
        option, value = rest.pop(0), rest.pop(0)
        assert option in ("--rc", "--env", "--mount"), option
        script = value if option == "--rc" else script
        names += [value] if option == "--env" else []
        mounts += [value] if option == "--mount" else []
    root = folder / "containers" / rest.pop(0)
    shutil.copy(script, root / "rc")
    image = {"PATH": "/usr/bin:/bin", "IMAGE": "yes"}
    become(folder, root, mounts, ["/bin/sh", "/rc", *rest], image | {name: os.environ[name] for name in names})


def become(folder: Path, image: Path, mounts: Sequence[str], command: Sequence[str], variables: dict[str, str]) -> None:
    """Go on in new namespaces, in which this user is as powerful as needed for mounts."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    inside = [sys.executable, "-I", "-S", __file__, str(folder), "inside", str(image), str(len(mounts)), *mounts]
    program = shutil.which("unshare") or "unshare"
    os.execve(program, ["unshare", *user, "--mount", "--propagation=slave", *inside, *command], variables)


def enter(words: list[str]) -> None:
    """Mount everything below `ROOT`, make it the root, and become the command."""
    image, count, *rest = words
    mounts, command = rest[: int(count)], rest[int(count) :]
    run("mount", "-t", "tmpfs", "tmpfs", str(ROOT))
    run("cp", "-a", f"{image}/.", str(ROOT))
    for mount in (*(f"{path}:{path}" for path in SYSTEM), *mounts):
        source, target, *flags = mount.split(":")
        inside = ROOT / target.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        run("mount", "--rbind", source, str(inside))
        if "ro" in ",".join(flags).split(","):
            run("mount", "-o", "remount,bind,ro", str(inside))
    os.chroot(ROOT)
    os.chdir("/")
    os.execvp(command[0], command)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    if done.returncode:
        sys.exit(f"FATAL:   {' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
