"""How many of the drafted tokens the servers accepted (`inference.speculation`).

Owns what is read of it in a server's metrics. A server that does not answer keeps its last number, one that is no
longer read has none. Must not know how drafts are made.
"""

import asyncio
from collections.abc import Sequence

import aiohttp

from pipeline.rollout.cache_load import read_metrics, values

_DRAFTED, _ACCEPTED = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"


class DraftAcceptance:
    """The accepted fraction of each server's drafted tokens since its start, by endpoint; absent before the first."""

    def __init__(self) -> None:
        self.fractions: dict[str, float] = {}

    async def read(self, http: aiohttp.ClientSession, endpoints: Sequence[str]) -> None:
        """Read every server once, all at the same time; forget all others."""
        self.fractions = {name: value for name, value in self.fractions.items() if name in endpoints}
        for endpoint, text in zip(
            endpoints, await asyncio.gather(*(read_metrics(http, each) for each in endpoints)), strict=True
        ):
            drafted = sum(values(text or "", _DRAFTED))
            if drafted:
                self.fractions[endpoint] = sum(values(text or "", _ACCEPTED)) / drafted
