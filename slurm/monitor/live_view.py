"""The live display of a run, on any machine that has access to its files: state, roles, progress and metrics.

Owns the output and its refreshes. Promises that it only reads, so that its end does not affect the job; that it prints
plain lines without control codes if the output is not a terminal; and that a temporary failure of the disk leaves the
last state on the screen. Must not know the processes.

    follow_run(run_dir, until=job.done)    for the launcher, which has the job's handle
    watch_run(run_dir)                     for other commands; continues over requeues and ends with the run

`slurm.monitor.run_watcher` reads the run, `slurm.monitor.run_snapshot` derives its state, and
`slurm.monitor.status_panel` and `slurm.monitor.log_lines` render it.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from pipeline.errors import RollcallError
from pipeline.observability.run_history import find_run
from pipeline.utils import terminal
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT, is_transient, retry_transient
from pipeline.utils.waiting import CLOCK, Clock
from slurm.monitor import runs_table, web_dashboard
from slurm.monitor.log_lines import LogLines
from slurm.monitor.refresh_loop import show_until_last
from slurm.monitor.run_snapshot import Snapshot
from slurm.monitor.run_watcher import Watcher
from slurm.monitor.status_panel import render_run
from slurm.scheduler.scheduler_protocol import Connect
from slurm.scheduler.scheduler_registry import connect_scheduler

REFRESH_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""Longest wait for the scheduler, during which the display does not refresh."""
EXIT_CODES = {"failed": 1, "not submitted": 1, "interrupted": 130}
"""The exit codes by a run's final state, the same as the launcher's."""
Look = tuple[Snapshot, bool]
"""A snapshot, and whether it is the last one to show."""


def follow_run(
    run_dir: Path,
    until: Callable[[], bool],
    *,
    attempt: str = "",
    console: Console | None = None,
    clock: Clock = CLOCK,
) -> Snapshot:
    """Show the run until `until()` is true. Returns the last snapshot.

    `attempt` is the attempt to show; default: always the newest. There is no deadline except `until`.
    """
    watcher = _SteadyLook(Watcher(run_dir, attempt), clock)

    def look() -> Look:
        last = until()
        return watcher.look(), last

    return _follow(look, console, clock)


def watch_run(
    run_dir: Path,
    console: Console | None = None,
    *,
    connect: Connect | None = None,
    clock: Clock = CLOCK,
) -> Snapshot:
    """Show the run over all its attempts until it has ended. Returns the last snapshot.

    The run's scheduler, by `connect`, answers if files are inconclusive. Without it, the display waits for a job that
    was cancelled in the queue.
    """
    watcher = _SteadyLook(Watcher(run_dir, connect=connect, clock=clock), clock)

    def look() -> Look:
        now = watcher.look()
        return now, now.ended

    return _follow(look, console, clock)


def main(arguments: Sequence[str]) -> int:
    """Watch the run of `run=<name or directory>`. Returns the exit code for its end, as the launcher does.

    For `sweep=<name or directory>`, see `slurm.monitor.runs_table.watch_sweep`; for `web`, see
    `slurm.monitor.web_dashboard.show_dashboard`.
    """
    if any(argument.startswith("sweep=") for argument in arguments):
        return runs_table.watch_sweep(arguments)
    try:
        if arguments and arguments[0] == web_dashboard.COMMAND:
            return web_dashboard.show_dashboard(arguments[1:])
        snapshot = watch_run(find_run(arguments), connect=lambda name: connect_scheduler(name, ANSWER_SECONDS))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; the run continues")
        return 0
    return EXIT_CODES.get(snapshot.state, 0)


class _SteadyLook:
    """A watcher that repeats its last snapshot while the disk fails for a transient reason."""

    def __init__(self, watcher: Watcher, clock: Clock) -> None:
        self._watcher, self._clock = watcher, clock
        self._last: Snapshot | None = None

    def look(self) -> Snapshot:
        """The newest readable snapshot. The first one is awaited for `FS_OUTAGE_TIMEOUT`."""
        if self._last is None:
            self._last = retry_transient("the run to be readable", self._watcher.look, FS_OUTAGE_TIMEOUT, self._clock)
            return self._last
        try:
            self._last = self._watcher.look()
        except OSError as error:
            if not is_transient(error):
                raise
        return self._last


def _follow(look: Callable[[], Look], console: Console | None, clock: Clock) -> Snapshot:
    """Show the snapshots of `look` until its last one."""
    console = console or terminal.console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:

            def draw(now: Snapshot, _: bool) -> None:
                live.update(render_run(now), refresh=True)

            return show_until_last(look, draw, REFRESH_SECONDS, clock)
    log_lines = LogLines()

    def print_lines(now: Snapshot, last: bool) -> None:
        for line in log_lines.lines(now, clock.now(), last=last):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show_until_last(look, print_lines, REFRESH_SECONDS, clock)
