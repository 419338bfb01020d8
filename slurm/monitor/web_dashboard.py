"""Trackio's dashboard of the runs on this machine, in a browser: `launchers/watch.py web [run=<name>]`.

Owns the process of the dashboard. Promises that it listens on 127.0.0.1 unless another address is named; that its end
is the end of its process, by its id; and that a run whose files are missing, or a missing package, is one error line.
It shows what the tracker `trackio` wrote, while the runs go on. Must not know the runs' jobs.
"""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.observability.run_history import RUNS, find_run
from pipeline.run.paths import RunPaths
from pipeline.tracking.tracker_protocol import is_installed, tracker_class
from pipeline.utils.optional_extras import pip_install
from pipeline.utils.subprocesses import Child, tail
from pipeline.utils.waiting import wait_for

COMMAND = "web"
"""The first argument of the command."""
TRACKER = "trackio"
DEFAULTS = {"run": "", "host": "127.0.0.1", "port": "7860"}
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 60.0, 10.0, 0.2
MAX_NAMES = 5
"""Number of runs that the line with the address names."""
MODULE = f"pipeline.tracking.trackers.{TRACKER}"


def show_dashboard(arguments: Sequence[str]) -> int:
    """Show the dashboard of `run=…`, or of all runs, until Ctrl-C. Returns the exit code.

    `ConfigError` for a missing package, a run without Trackio's files, or an address that is not free.
    """
    options = _options(arguments)
    if not is_installed(TRACKER):
        raise ConfigError(COMMAND, TRACKER, "the package trackio, which is not installed", pip_install(TRACKER))
    files = _files(options["run"])
    host, port = _free_address(options["host"], options["port"])
    with tempfile.TemporaryDirectory(prefix="rollcall-dashboard-") as folder:
        store = Path(folder) / TRACKER
        store.mkdir()
        for name, file in files.items():
            (store / f"{name}.db").symlink_to(file)
        return _serve(Path(folder), host, port, list(files))


def _options(arguments: Sequence[str]) -> dict[str, str]:
    options = dict(DEFAULTS)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in DEFAULTS:
            expected = "run=<name or directory>, host=<address> or port=<number>"
            raise ConfigError(COMMAND, argument, expected, "web run=demo")
        options[name] = value
    return options


def _files(run: str) -> dict[str, Path]:
    """Trackio's files by the name that the dashboard shows: the run's, or those of all runs."""
    if run:
        root = find_run([f"run={run}"])
        roots = [(root.name, root)]
        value, expected = root.name, "a run with files of Trackio"
    else:
        candidates = [*RUNS.glob("*/"), *RUNS.glob("*/*/")]  # runs, and the points of sweeps
        runs = [root for root in candidates if RunPaths(root).run.exists()]
        roots = [(".".join(root.relative_to(RUNS).parts), root) for root in runs]
        value, expected = str(RUNS), "at least one run with files of Trackio"
    files = dict[str, Path]()
    for run_name, root in roots:
        for name, file in _files_of(root, run_name):
            files[_free_name(name, files)] = file
    if not files:
        raise ConfigError("run", value, expected, "submit it with tracking=trackio (offline, without TRACKIO_SPACE_ID)")
    return files


def _files_of(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The files of a run under its name; of a run that was resumed with another `tracking.project`, also under those of
    its projects."""
    files = sorted((RunPaths(root).tracking / TRACKER).glob("*.db"))
    for file in files:
        yield name if len(files) == 1 else f"{name}.{file.stem}", file.resolve()


def _free_name(name: str, taken: Container[str]) -> str:
    """The name, with a number if it is taken: a run `a.b` and the point `b` of a sweep `a` have the same one."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)


def _free_address(host: str, port: str) -> tuple[str, int]:
    """The address, which no other program uses."""
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError("port", port, "a number from 1 to 65535", f"port={DEFAULTS['port']}")
    try:
        family, *_ = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("port", port, f"a free port of {host} ({reason})", "name another: port=…") from None
    return host, int(port)


def _serve(folder: Path, host: str, port: int, names: Sequence[str]) -> int:
    """Run the dashboard until Ctrl-C or its end."""
    environment = {**os.environ, **tracker_class(TRACKER).variables(folder, "offline")}
    # In its own session: Ctrl-C reaches this process only, which ends the dashboard. It ends with this process too.
    child = Child([sys.executable, "-P", "-m", MODULE, host, str(port)], folder / "log", environment)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        started = partial(_has_started, child, host, port)
        wait_for("Trackio's dashboard", started, START_SECONDS, pause=0.1)
        if child.poll() is None:
            shown = ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} runs"
            print(f"http://{host}:{port}/ shows {shown}; Ctrl-C ends it, and affects no run", flush=True)
        while child.poll() is None:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print("left; the runs continue")
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
        code = child.stop(STOP_SECONDS)
    last = (tail(child.log, 1) or ["it printed nothing"])[0]
    print(f"error: the dashboard ended with code {code}: {last}", file=sys.stderr)
    return 1


def _has_started(child: Child, host: str, port: int) -> bool:
    """Whether the dashboard accepts connections, or has ended."""
    if child.poll() is not None:
        return True
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
