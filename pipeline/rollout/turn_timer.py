"""The times of the turns of a running episode (`pipeline.transport.turn_times`).

timer = TurnTimer()
began = timer.now
turn = await …                      # the policy samples a turn after `tokens`
timer.add(len(tokens), turn.tokens, turn.server, began, turn.engine_seconds)
with timer.tool():
    …                               # a tool runs
timer.turns_of(episode)             # the turns whose tokens are in the episode
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from pipeline.environments import Episode
from pipeline.transport.turn_times import EngineSeconds, TurnTimes

DIGITS = 4
"""Decimal places of the stored seconds: the noise of further digits would only make files larger."""
Row = tuple[Sequence[int], Sequence[int]]
"""The tokens of a row, and 1 for each token that the policy sampled."""


@dataclass(eq=False)
class _Turn:
    start: int
    tokens: Sequence[int]
    server: str
    begin: float
    request: float
    engine: EngineSeconds | None
    tools: float | None = None


class TurnTimer:
    """Measures one episode, which begins with the construction."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._turns: list[_Turn] = []

    @property
    def now(self) -> float:
        """The seconds since the episode began."""
        return time.monotonic() - self._began

    def add(
        self, start: int, tokens: Sequence[int], server: str, began: float, engine: EngineSeconds | None = None
    ) -> None:
        """Add a turn that was sampled after `start` tokens, and requested `began` seconds after the episode's start."""
        self._turns.append(_Turn(start, tokens, server, began, self.now - began, engine))

    @contextmanager
    def tool(self) -> Iterator[None]:
        """Count the block as a tool call of the newest turn."""
        turn, began = self._turns[-1] if self._turns else None, self.now
        try:
            yield
        finally:
            if turn is not None:
                turn.tools = (turn.tools or 0.0) + self.now - began

    def turns_of(self, episode: Episode) -> tuple[TurnTimes, ...]:
        """The times of each turn of the episode, in the order of the responses. A turn that the task dropped, or whose
        tokens it changed, has none."""
        rows, taken, located = _rows_of(episode), set[tuple[int, int]](), list[TurnTimes]()
        for turn in self._turns:
            row = _row_with(turn, rows, taken)
            if row is not None:
                taken.add((row, turn.start))
                located.append(_times(turn, row))
        return tuple(located)


def _rows_of(episode: Episode) -> list[Row]:
    """The rows of an episode, as `Sample.rows` has them."""
    rows: list[Row] = [(episode.tokens, episode.sampled)]
    for branch in episode.branches:
        prefix = rows[branch.of][0][: branch.shared]
        rows.append(((*prefix, *branch.tokens), (*(0 for _ in prefix), *branch.sampled)))
    return rows


def _row_with(turn: _Turn, rows: Sequence[Row], taken: set[tuple[int, int]]) -> int | None:
    """The row in which most of a turn's tokens are at its start, of those whose tokens there are not another turn's."""
    lengths = [0 if (number, turn.start) in taken else _matching(turn, row) for number, row in enumerate(rows)]
    longest = max(lengths)
    return lengths.index(longest) if longest else None


def _matching(turn: _Turn, row: Row) -> int:
    """The number of the turn's first tokens that a row has as sampled at the turn's start."""
    tokens, sampled = row
    if turn.start >= len(tokens) or not sampled[turn.start]:
        return 0
    there = tuple(tokens[turn.start : turn.start + len(turn.tokens)])
    if there == tuple(turn.tokens):  # nearly always, and a hundredth of the time of the loop below
        return len(there)
    return sum(takewhile(bool, map(eq, turn.tokens, there)))


def _times(turn: _Turn, row: int) -> TurnTimes:
    seconds = turn.begin, turn.request, *(turn.engine or (None, None, None)), turn.tools
    rounded = (None if value is None else round(value, DIGITS) for value in seconds)
    begin, request, queue, prefill, decode, tools = rounded
    return TurnTimes(row, turn.start, turn.server, begin or 0.0, request or 0.0, queue, prefill, decode, tools)
