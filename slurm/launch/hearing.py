"""Signals that tell a process to end, for a process that first has something to put in order.

Owns the signals by which schedulers, shells and users say so, and their handlers for the length of a block. Promises
that the first of them is only noted, with one line for people, and that a second Ctrl-C ends the process as it would
have without: who is impatient is obeyed. A signal that the process was started to ignore (nohup) stays ignored.

    with heard(stop.ask) as told:
        …                       # minutes
    if told.by: …               # SIGTERM
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOTICE = signal.SIGUSR2
"""What Slurm sends `cluster.notice_seconds` before the time limit."""

_WORDS = "ending after this step, which is committed; Ctrl-C ends at once"


class EndSignal:
    """`by`: the first signal that was heard, or None."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.by: signal.Signals | None = None
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler; `KeyboardInterrupt` for a Ctrl-C that is not the first signal."""
        del frame
        if self.by is None:
            self.by = signal.Signals(number)
            self._act()
            with suppress(OSError):  # a terminal that was closed takes no word, and is why HUP comes
                os.write(2, f"{self.by.name}: {_WORDS}\n".encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def heard(act: Callable[[], None]) -> Iterator[EndSignal]:
    """Call `act` at the first signal of the block. Only for the main thread."""
    told, before = EndSignal(act), dict[signal.Signals, Any]()
    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, told)
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
