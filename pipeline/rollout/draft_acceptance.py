"""How many of the drafted tokens the servers accepted (`inference.speculation`).

Owns the counts of all servers together, which the actor reports, and the fraction of a period, which a metrics record
has. Promises that counts never fall, whatever servers restart, join or leave, and that a fraction is in 0 … 1. Must not
know how drafts are made.
"""

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp

from pipeline.rollout.cache_load import read_metrics, values

DRAFTED, ACCEPTED = "drafts/drafted", "drafts/accepted"
"""The names of the counts in the actor's status."""
_COUNTERS = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
Counts = tuple[float, float]
"""Drafted tokens, and those of them that were accepted."""


class DraftCounts:
    """The drafted and the accepted tokens of all servers since the first reading of each.

    Attributes:
        total: the sum over all servers, those that have left included.
    """

    def __init__(self) -> None:
        self.total: Counts = (0.0, 0.0)
        self._seen: dict[str, Counts] = {}

    async def read(self, http: aiohttp.ClientSession, endpoints: Sequence[str]) -> None:
        """Read every server once, all at the same time; forget all others. One that does not answer, or has not drafted
        yet, adds nothing now: its next answer has all that it missed."""
        self._seen = {name: counts for name, counts in self._seen.items() if name in endpoints}
        for endpoint, text in zip(
            endpoints, await asyncio.gather(*(read_metrics(http, each) for each in endpoints)), strict=True
        ):
            if text is not None:
                now = counts_in(text)
                # The first reading is where counting begins: of what a server did before, earlier records have a part.
                new = progress(self._seen.get(endpoint, now), now)
                self.total = self.total[0] + new[0], self.total[1] + new[1]
                self._seen[endpoint] = now

    def numbers(self) -> dict[str, float]:
        """The counts for the actor's status; empty before the first drafted token."""
        return dict(zip((DRAFTED, ACCEPTED), self.total, strict=True)) if self.total[0] else {}


class AcceptanceRate:
    """The accepted fraction of what was drafted between two calls, out of the actor's status."""

    def __init__(self) -> None:
        self._seen: Counts = (0.0, 0.0)

    def take(self, numbers: Mapping[str, float]) -> float | None:
        """The fraction since the last call that was not None; None if nothing was drafted since."""
        now = numbers.get(DRAFTED, 0.0), numbers.get(ACCEPTED, 0.0)
        drafted, accepted = progress(self._seen, now)
        if not drafted:
            return None
        self._seen = now
        return accepted / drafted


def counts_in(text: str) -> Counts:
    """The counts in a server's metrics, over all its engines."""
    drafted, accepted = (sum(values(text, name)) for name in _COUNTERS)
    # The two are not read in one moment, and tokens may be accepted in between.
    return drafted, min(drafted, accepted)


def progress(before: Counts, now: Counts) -> Counts:
    """What was counted since `before`; all of `now` if the counters began again in between.

    >>> progress((100, 20), (150, 60)), progress((100, 20), (30, 10)), progress((100, 20), (100, 23))
    ((50, 40), (30, 10), (0, 0))
    """
    drafted, accepted = now[0] - before[0], now[1] - before[1]
    if drafted < 0 or accepted < 0:
        return now
    return drafted, min(drafted, accepted)  # the two are not read in one moment
