"""Signals that request a launcher's end.

Owns the list of signals and their handler, which records a signal instead of ending the process, so that the launcher
can shut down its job in order. Promises that SIGHUP stays ignored if it was ignored before, as under `nohup`, and that
after a handled SIGHUP nothing more is written to the closed terminal.

    with recorded_signals() as received:
        …                                # minutes
    if received: …                       # [SIGTERM]; a second signal means: end at once
"""

import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that users, shells and schedulers send."""


def exit_code(number: signal.Signals) -> int:
    """The exit code of a launcher that this signal ended, as in shells: 130 for INT, 143 for TERM."""
    return 128 + number


def describe(number: signal.Signals) -> str:
    """The recorded reason of a launcher's end by this signal."""
    return f"interrupted by {'Ctrl-C (SIGINT)' if number == signal.SIGINT else number.name} at the launcher"


INTERRUPTED = frozenset(map(exit_code, SIGNALS))
"""The exit codes of launchers that a signal ended."""


@contextmanager
def recorded_signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that arrive within the block, in order. Only for the main thread."""
    received: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if number == signal.SIGHUP:
            _release_terminal()

    handled = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _release_terminal() -> None:
    """Redirect standard output and error from the terminal to /dev/null; a file or a pipe stays.

    Every write to a closed terminal fails, and such an error must not interrupt the shutdown of the job.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                os.dup2(nowhere.fileno(), stream.fileno())
