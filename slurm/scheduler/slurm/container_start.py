"""The start of a rank's container on its node, by apptainer or enroot: a script that the host's Python executes.

Owns a node's side of a container: the checks before its start, and with enroot the root file system. Promises that one
line names a part that the node lacks, that signals for the agent neither end the runtime nor are lost while it starts,
and that the root file system is removed when the agent has ended.

    container_start.py --image=/images/rollcall.sif -- apptainer exec --bind /runs/demo:/runs/demo \
        /images/rollcall.sif python3 -I container_entry.py …
    container_start.py --image=/images/rollcall.sqsh -- enroot start --mount /runs/demo:/runs/demo:none:rbind \
        /images/rollcall.sqsh python3 -I container_entry.py …

apptainer replaces this process, and forwards signals to its container. With enroot this process forwards them, waits
for the agent and then removes the container. Imports the standard library only, since it runs without site-packages.
"""

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PREFIX = "rollcall: container: "
"""The begin of the line that explains why a container did not start (`slurm.batch.container_failure` reads it)."""
MISSING = 127
"""Exit code for a node that lacks a part of the container, as a shell's for an unknown command."""
SIGNALED = 128
"""Exit code of a command that a signal ended, less the signal's number, as a shell's."""
POLL_SECONDS = 1.0
"""Longest delay of the end of a child that ended before its signal was awaited."""
ENROOT_SECONDS = 3600.0
"""Deadline of the download or the extraction of an image."""
MOUNT_OPTIONS = {"apptainer": "--bind", "enroot": "--mount"}
"""The option of each runtime whose value starts with a path of the node."""
OF_IMAGE = frozenset({"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV"})
"""Variables that only the image of an enroot container sets."""
_NAME = re.compile(r"(?!ENROOT_)[A-Za-z_]\w*", re.ASCII)


class NodeError(Exception):
    """The node lacks a part of the container."""


def main(arguments: Sequence[str]) -> int:
    """Run the container's command. Returns its exit code with enroot, `MISSING` if the node lacks a part of it."""
    # Blocked until the agent handles them: the processes of a runtime that keeps the mask inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    options, command = _read(arguments)
    try:
        check_node(command, options.image, options.cache)
        command = with_temporary_folder(command, os.environ)
        if command[0] == "enroot":
            return run_enroot(command, options.image)
        os.execvp(command[0], command)
    except NodeError as error:
        print(f"{PREFIX}node {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return MISSING


def _read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, and the command of the runtime after it."""
    end = list(arguments).index("--")
    parser = argparse.ArgumentParser(prog=Path(__file__).name)
    parser.add_argument("--image", required=True)
    parser.add_argument("--cache", action="append", default=[])
    return parser.parse_args(arguments[:end]), list(arguments[end + 1 :])


def check_node(command: Sequence[str], image: str, caches: Sequence[str]) -> None:
    """Create the caches. `NodeError` unless the node has the runtime, the image and all mounted paths."""
    if shutil.which(command[0]) is None:
        hint = "load it in cluster.setup, exclude the node (cluster.exclude), or set another cluster.container.kind"
        raise NodeError(f"{command[0]} is not on PATH; {hint}")
    if image.startswith("/") and not Path(image).exists():
        raise NodeError(f"no {image}; move the image to a file system of all nodes")
    for cache in caches:
        try:
            Path(cache).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "set XDG_CACHE_HOME or cluster.compile_cache to a directory that all nodes can write to"
            raise NodeError(f"{cache} cannot be created: {error.strerror}; {hint}") from None
    for option, value in pairwise(command):
        if option == MOUNT_OPTIONS.get(command[0]) and not Path(source := value.split(":")[0]).exists():
            hint = "mount only paths that all nodes have, or exclude the node (cluster.exclude)"
            raise NodeError(f"no {source}, which the container mounts; {hint}")


def with_temporary_folder(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command with a mount of this node's `TMPDIR`, where it has one in addition to /tmp."""
    folder = variables.get("TMPDIR", "").rstrip("/")
    if not folder or Path("/tmp") in (path := Path(folder), *path.parents) or not path.is_dir():
        return list(command)
    option, end = ("--mount", ":none:x-create=dir,rbind") if command[0] == "enroot" else ("--bind", "")
    return [*command[:2], option, f"{folder}:{folder}{end}", *command[2:]]


def run_enroot(command: Sequence[str], image: str) -> int:
    """Create the container's root file system, run the command in it, and remove it. Returns the command's exit code.

    The name has job and rank, so that ranks on one node, and jobs that share a home directory, do not meet. A root file
    system that a killed rank left is replaced, and a part of one that enroot could not create is removed.
    """
    name = f"rollcall-{os.environ.get('SLURM_JOB_ID', os.getpid())}-{os.environ.get('SLURM_PROCID', 0)}"
    with tempfile.TemporaryDirectory(prefix="rollcall-enroot-", ignore_cleanup_errors=True) as folder:
        _create_root(name, image, Path(folder))
        try:
            script = Path(folder) / "rc"
            script.write_text('exec "$@"\n')  # in place of the image's entry point, which need not become the command
            code = run_forwarding(enroot_command(command, image, name, script, os.environ))
            return code if code >= 0 else SIGNALED - code
        finally:
            _remove_root(name)


def run_forwarding(command: Sequence[str]) -> int:
    """Run a command to its end, and send it the signals of this process. Returns its exit code, negative for a signal.

    Slurm signals every process of a step, or with `proctrack/cgroup` only the task, which is this process. The command
    inherits the mask, so that a signal which comes before the agent handles it stays pending.
    """
    with subprocess.Popen(command) as child:
        # Blocked for this process alone, so that the end of the child ends the wait below.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        while child.poll() is None:
            received = signal.sigtimedwait({*SIGNALS, signal.SIGCHLD}, POLL_SECONDS)
            if received is not None and received.si_signo in SIGNALS:
                child.send_signal(received.si_signo)
    return child.returncode


def enroot_command(
    command: Sequence[str], image: str, name: str, script: Path, variables: Mapping[str, str]
) -> list[str]:
    """`enroot start` of the container `name` instead of the image, with the variables of this process.

    enroot passes no variable by itself, and one line for each. Values stay out of the command line, which other users
    can read.
    """
    names = [key for key in variables if _NAME.fullmatch(key) and key not in OF_IMAGE]
    passed = [key for key in names if "\n" not in variables[key]]
    if lost := sorted(set(names) - set(passed)):
        print(f"rollcall: enroot cannot pass {', '.join(lost)}, whose values have several lines", file=sys.stderr)
    words = [name if word == image else word for word in command[2:]]
    return [*command[:2], "--rc", str(script), *(word for key in passed for word in ("--env", key)), *words]


def _create_root(name: str, image: str, folder: Path) -> None:
    """Create the root file system of an image file, or of an address of a registry. `NodeError` if enroot fails."""
    file = Path(image)
    if "://" in image:
        file = folder / "image.sqsh"
        _enroot("import", "--output", str(file), image)
    try:
        _enroot("create", "--force", "--name", name, str(file))
    except NodeError:
        with suppress(NodeError):  # there is none if enroot refused the image; a full disk leaves a part of one
            _enroot("remove", "--force", name)
        raise
    if "://" in image:
        file.unlink(missing_ok=True)


def _remove_root(name: str) -> None:
    try:
        _enroot("remove", "--force", name)
    except NodeError as error:
        print(f"rollcall: container {name} is left on this node: {error}", file=sys.stderr, flush=True)


def _enroot(*words: str) -> None:
    """Run a command of enroot to its end; `NodeError` if it fails."""
    try:
        done = subprocess.run(
            ["enroot", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ENROOT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NodeError(f"enroot {words[0]} did not end within {ENROOT_SECONDS:g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise NodeError(f"enroot {words[0]} failed: {lines[-1] if lines else f'exit code {done.returncode}'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
