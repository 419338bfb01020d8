"""Signals that ask a launcher to end.

Owns which they are and what a launcher makes of them: a note, instead of its end, so that what it started comes down in
order. Promises that a hang-up stays ignored where it was ignored before, as under `nohup`, and that after any other one
nothing more is written to the terminal, which is gone.

    with recorded_signals() as received:
        …                                # minutes
    if received: …                       # [SIGTERM]; the first counts, a second one is somebody impatient
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
"""What users, shells and schedulers send."""


def exit_code(number: signal.Signals) -> int:
    """Of a launcher that this signal ended, as shells count it: 130 for INT, 143 for TERM."""
    return 128 + number


def describe(number: signal.Signals) -> str:
    """What a launcher records of its end by this signal."""
    return f"interrupted by {'Ctrl-C (SIGINT)' if number == signal.SIGINT else number.name} at the launcher"


INTERRUPTED = frozenset(map(exit_code, SIGNALS))
"""The exit codes of launchers that were told to end."""


@contextmanager
def recorded_signals() -> Iterator[list[signal.Signals]]:
    """Collects the signals of the block, in order. Only for the main thread."""
    received: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if number == signal.SIGHUP:
            _release_terminal()

    wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _release_terminal() -> None:
    """Have standard output and error lead nowhere where they lead to a terminal: every write to one that was closed
    fails, and must not end what still has to come down. A file or a pipe stays."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                os.dup2(nowhere.fileno(), stream.fileno())
