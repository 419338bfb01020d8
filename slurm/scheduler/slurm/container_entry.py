"""The first process of an agent in a container: a script that the Python of the image executes.

Owns the environment of an agent in a container. Promises that one line explains an image that cannot run Rollcall, and
that the agent replaces this process, so that it has the process id and the signals of the container's command.

    python3 -I <code>/slurm/scheduler/slurm/container_entry.py <code> <directory> -u -m submitit.core._submit <folder>

Imports the standard library only, since the image may have nothing else, and has no syntax newer than Python 3.8.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path

OLDEST = (3, 11)
PACKAGES = ("cloudpickle", "msgspec", "psutil", "pydantic", "submitit", "torch")
"""Packages without which no agent or no trainer starts."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PREFIX = "rollcall: container: "
"""The begin of the line that explains why a container did not start (`slurm.batch.container_failure` reads it)."""
REMEDY = "install Rollcall's packages in the image, or set cluster.container.python"


def missing_packages(paths: list[str]) -> list[str]:
    """The packages that this Python cannot import from `paths`."""
    return [name for name in PACKAGES if PathFinder.find_spec(name, paths) is None]


def problem_of(code: str, paths: list[str], oldest: tuple[int, int] = OLDEST) -> str:
    """Why this Python cannot run the agent, with a remedy; empty if it can.

    `code` is the run's code snapshot, `paths` the folders of importable modules.
    """
    python = f"{sys.executable} of the image"
    if sys.version_info < oldest:
        version = ".".join(str(number) for number in sys.version_info[:2])
        return f"{python} is Python {version}, older than {oldest[0]}.{oldest[1]}; {REMEDY}"
    if missing := missing_packages(paths):
        return f"{python} has no {', '.join(missing)}; {REMEDY}"
    if not Path(code).is_dir():
        return f"{code} is not in the container; do not mount another directory over it"
    return ""


def agent_environment(variables: dict[str, str], code: str) -> dict[str, str]:
    """The environment of the agent: that of the container, with the run's code before all other code.

    An image may set PYTHONPATH, which then replaces the job's. Packages in the user's home directory were installed for
    another Python.
    """
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", code)]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join([code, *paths]),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "SUBMITIT_EXECUTOR": "slurm",
    }


def main(arguments: list[str]) -> int:
    """Become the agent, in the working `directory`. Returns 2, after one line, if this Python cannot run it."""
    # Blocked until `note_signals` handles them. apptainer replaces the mask of the host's process by SIGCHLD alone.
    signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS)
    code, directory, *words = arguments
    environment = agent_environment(dict(os.environ), code)
    problem = problem_of(code, [*environment["PYTHONPATH"].split(os.pathsep), *sys.path])
    if not problem:
        os.chdir(directory)
        os.execve(sys.executable, [sys.executable, *words], environment)
    print(f"{PREFIX}{problem}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
