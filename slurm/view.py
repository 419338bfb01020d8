"""Following a run from its files alone: state, roles, progress and numbers, live in a terminal.

Owns what the terminal shows and when. Promises that it only reads, so that ending it leaves the job alone, and that it
prints plain lines without control codes where there is no terminal. Must not know the scheduler or the processes.

    follow(run_dir, until=job.done)        the launcher, which knows its job
    watch(run_dir)                         anybody else; ends when the attempt ended

`slurm.snapshot` says what is the case, `slurm.display` how it looks.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from pipeline.errors import RollcallError
from pipeline.report.history import find_run
from pipeline.waiting import CLOCK, Clock
from slurm.display import Ticker, render
from slurm.snapshot import Snapshot, Watcher

REFRESH_SECONDS = 0.5
EXIT_CODES = {"failed": 1, "interrupted": 130}
"""By the state a run ended in; as the launcher's."""


def follow(
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
    console = console or Console()
    watcher = Watcher(run_dir, attempt)
    if console.is_terminal:
        return _follow_live(watcher, until, console, clock)
    return _follow_lines(watcher, until, console, clock)


def watch(run_dir: Path, console: Console | None = None) -> Snapshot:
    """Show the newest attempt until it ended: finished, failed or interrupted."""
    watcher = Watcher(run_dir)
    return follow(run_dir, lambda: watcher.look().ended, console=console)


def main(arguments: Sequence[str]) -> int:
    """`run=<name or directory>`: watch a run; the exit code says how it ended, as the launcher's would."""
    try:
        snapshot = watch(find_run(arguments))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; the run goes on")
        return 0
    return EXIT_CODES.get(snapshot.state, 0)


def _follow_live(watcher: Watcher, until: Callable[[], bool], console: Console, clock: Clock) -> Snapshot:
    snapshot = watcher.look()
    with Live(render(snapshot), console=console, auto_refresh=False) as live:
        ended = False
        while not ended:
            ended = until()
            snapshot = watcher.look()
            live.update(render(snapshot), refresh=True)
            if not ended:
                clock.sleep(REFRESH_SECONDS)
    return snapshot


def _follow_lines(watcher: Watcher, until: Callable[[], bool], console: Console, clock: Clock) -> Snapshot:
    ticker = Ticker()
    while True:
        ended = until()
        snapshot = watcher.look()
        for line in ticker.lines(snapshot, clock.now(), last=ended):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if ended:
            return snapshot
        clock.sleep(REFRESH_SECONDS)
