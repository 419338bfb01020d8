"""Following a run from any machine that sees its files: state, roles, progress and numbers, live in a terminal.

Owns what the terminal shows and when. Promises that it only reads, so that ending it leaves the job alone, and that it
prints plain lines without control codes where there is no terminal; and that a disk which fails for a while ends
nothing: the last picture stands meanwhile. Must not know the processes.

    follow_run(run_dir, until=job.done)    the launcher, which knows its job
    watch_run(run_dir)                     anybody else; goes on over requeues and ends with the run

`slurm.monitor.run_watcher` looks, `slurm.monitor.run_snapshot` says what is the case, `slurm.monitor.status_panel` and
`slurm.monitor.log_lines` how it looks.
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
from slurm.monitor import runs_table
from slurm.monitor.log_lines import LogLines
from slurm.monitor.refresh_loop import show_until_last
from slurm.monitor.run_snapshot import Snapshot
from slurm.monitor.run_watcher import Watcher
from slurm.monitor.status_panel import render_run
from slurm.scheduler.scheduler_protocol import Scheduler
from slurm.scheduler.slurm.slurm_commands import find_slurm

REFRESH_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""Nobody waits longer than this for the scheduler: meanwhile the picture stands still."""
EXIT_CODES = {"failed": 1, "not submitted": 1, "interrupted": 130}
"""By the state in which a run ended; the launcher's exit codes."""
Look = tuple[Snapshot, bool]
"""A run as it is, and whether that is the last to show."""


def follow_run(
    run_dir: Path,
    until: Callable[[], bool],
    *,
    attempt: str = "",
    console: Console | None = None,
    clock: Clock = CLOCK,
) -> Snapshot:
    """Show the run until `until()`; the last snapshot.

    `attempt` is the one to show; without a name it is always the newest. A run without an end is followed without one:
    the caller's `until` is what bounds it.
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
    scheduler: Callable[[], Scheduler] | None = None,
    clock: Clock = CLOCK,
) -> Snapshot:
    """Show the run, over all its attempts, until it ended, or at once if there is nothing to wait for.

    `scheduler` is asked where files cannot tell: without it, a job that was cancelled in the queue is waited for.
    """
    watcher = _SteadyLook(Watcher(run_dir, scheduler=scheduler, clock=clock), clock)

    def look() -> Look:
        now = watcher.look()
        return now, now.ended

    return _follow(look, console, clock)


def main(arguments: Sequence[str]) -> int:
    """`run=<name or directory>`: watch a run; the exit code says how it ended, as the launcher's would.

    `sweep=<name or directory>`: see `slurm.monitor.runs_table.watch`.
    """
    if any(argument.startswith("sweep=") for argument in arguments):
        return runs_table.watch_sweep(arguments)
    try:
        snapshot = watch_run(find_run(arguments), scheduler=lambda: find_slurm(ANSWER_SECONDS))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; the run goes on")
        return 0
    return EXIT_CODES.get(snapshot.state, 0)


class _SteadyLook:
    """A watcher whose last snapshot stands while the disk fails for a transient reason."""

    def __init__(self, watcher: Watcher, clock: Clock) -> None:
        self._watcher, self._clock = watcher, clock
        self._last: Snapshot | None = None

    def look(self) -> Snapshot:
        """The run as it is now, or was when the disk last gave it; at first `FS_OUTAGE_TIMEOUT` are waited for that."""
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
    """Show one look after the other until the last."""
    console = console or terminal.console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:

            def draw(now: Snapshot, _: bool) -> None:
                live.update(render_run(now), refresh=True)

            return show_until_last(look, draw, REFRESH_SECONDS, clock)
    ticker = LogLines()

    def tell(now: Snapshot, last: bool) -> None:
        for line in ticker.lines(now, clock.now(), last=last):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show_until_last(look, tell, REFRESH_SECONDS, clock)
