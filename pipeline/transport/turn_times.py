"""The times of an episode's turns, as samples carry and store them.

All numbers are seconds. The engine measures three of them for each request, with its own clock:

- `queue`: from the arrival of the request in the engine's queue to the first step that computes a part of it.
- `prefill`: from there to the first sampled token. Steps that compute other requests in between count.
- `decode`: from the first sampled token to the last one. A pause for new weights counts.

The actor measures the others. `request` runs from the turn's request to its response: the wait for a server, the
network and repeated requests count, and so does the slowest sample of a group, whose first turns share one request.
So `request` is at least `queue` + `prefill` + `decode`, and the rest is time outside of the engine.
"""

from typing import NamedTuple

import msgspec


class EngineSeconds(NamedTuple):
    """The engine's times of one request, or their sums over the requests of a turn."""

    queue: float
    prefill: float
    decode: float


class TurnTimes(msgspec.Struct, frozen=True, array_like=True):
    """The times of one turn of the policy, and the tokens to which they belong.

    Attributes:
        row, start: the row of the episode, and the index of the turn's first sampled token in it.
        server: the server that sampled the turn's last token (`host:port`).
        begin: from the start of the episode to the turn's request.
        request: from the request to the response.
        queue, prefill, decode: the engine's times; None if the server reports none.
        tools: the sum over the tool calls after the turn, each from the call to its result: the wait for a free worker
            process counts. None without a call.
    """

    row: int
    start: int
    server: str
    begin: float
    request: float
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    tools: float | None = None


def sum_of(first: EngineSeconds | None, second: EngineSeconds | None) -> EngineSeconds | None:
    """The times of two requests of a turn. A request without times counts as 0; None if neither has any."""
    if first is None or second is None:
        return first or second
    return EngineSeconds(*(one + other for one, other in zip(first, second, strict=True)))
