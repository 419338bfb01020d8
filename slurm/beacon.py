"""Proof that an address leads to a rank.

Owns the connect-back: every agent answers connections with a line that names its run, attempt and rank, and the
leader calls each card's addresses until one gives the right line. Promises that a port that somebody else took
meanwhile is not mistaken for ours. Knows no roles; the line is no secret and protects nothing but against mistakes.
"""

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType

from pipeline.plan import Card

CALLERS = 64
ANSWER_SECONDS = 1.0
LONGEST_LINE = 512


class Beacon:
    """Answers connections to this rank until it is closed; usable as a context manager.

    `address` is the interface to listen on, all of them by default; `port` is chosen by the system.
    """

    def __init__(self, run_id: str, attempt: str, rank: int, address: str = "") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._line = _line(run_id, attempt, rank)
        self._socket = socket.create_server((address, 0), family=family, backlog=CALLERS)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        # On Linux this wakes the thread that waits in accept().
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Beacon":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue  # the caller went away before its turn
            except OSError:
                return  # closed
            with caller:
                _send(caller, self._line)


def find_addresses(run_id: str, cards: Sequence[Card], seconds: float = ANSWER_SECONDS) -> Mapping[int, str]:
    """For each card the first of its addresses where its rank answers within `seconds`; by rank.

    A rank that answers nowhere is absent. Calls up to 64 ranks at once.
    """
    if not cards:
        return {}
    with ThreadPoolExecutor(min(CALLERS, len(cards)), thread_name_prefix="call") as callers:
        found = callers.map(partial(_find_address, run_id, seconds=seconds), cards)
        return {card.rank: address for card, address in zip(cards, found, strict=True) if address}


def _find_address(run_id: str, card: Card, seconds: float) -> str | None:
    line = _line(run_id, card.attempt, card.rank)
    return next((address for address in card.addresses if _call(address, card.beacon, seconds) == line), None)


def _call(address: str, port: int, seconds: float) -> bytes:
    """The line that is answered there; empty if none is."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as call:
            return call.recv(LONGEST_LINE)
    except OSError:
        return b""


def _send(caller: socket.socket, line: bytes) -> None:
    try:
        caller.settimeout(ANSWER_SECONDS)
        caller.sendall(line)
    except OSError:
        pass  # the caller asks again, or asks another address


def _line(run_id: str, attempt: str, rank: int) -> bytes:
    return f"rollcall {run_id} {attempt} {rank}\n".encode()
