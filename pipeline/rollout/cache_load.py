"""The load of the servers' KV caches: what they report, and what their responses show.

Owns the two numbers that are read of a server's metrics. Promises that a server which does not answer in time changes
nothing. Must not know what is done about the load (`concurrency_control`).
"""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import aiohttp

from pipeline.rollout.server_client import PromptTokens, Server

METRICS = "/metrics"
READ_SECONDS = 5.0
MIN_RESPONSES = 16
"""Responses to continued requests from which their hit rate means something."""
_USAGE, _PREEMPTIONS = "kv_cache_usage_perc", "num_preemptions_total"


@dataclass(frozen=True)
class CacheLoad:
    """The load of a period: the `hit_rate`, `kv_usage` and `preemptions` of `concurrency_control.ServerLoad`."""

    hit_rate: float | None = None
    kv_usage: float = 0.0
    preemptions: int = 0


class CacheWatch:
    """Reads the load again and again; each time of the period since the last one."""

    def __init__(self) -> None:
        self._preemptions: dict[str, int] = {}
        self._seen: dict[str, PromptTokens] = {}

    async def load(self, http: aiohttp.ClientSession, servers: Sequence[Server]) -> CacheLoad:
        metrics = await asyncio.gather(*(read_metrics(http, server.endpoint) for server in servers))
        usage, preemptions = 0.0, 0
        for server, text in zip(servers, metrics, strict=True):
            if text is not None:
                usage = max(usage, max(values(text, _USAGE), default=0.0))
                total = int(sum(values(text, _PREEMPTIONS)))
                preemptions += max(0, total - self._preemptions.get(server.endpoint, total))
                self._preemptions[server.endpoint] = total
        return CacheLoad(self._hit_rate(servers), usage, preemptions)

    def _hit_rate(self, servers: Sequence[Server]) -> float | None:
        """That of continued requests since the last one that was not None."""
        new_counts = [self._new_counts(server) for server in servers]
        if sum(count.responses for count in new_counts) < MIN_RESPONSES:
            return None
        self._seen |= {server.endpoint: replace(server.continued) for server in servers}
        return sum(count.cached for count in new_counts) / sum(count.tokens for count in new_counts)

    def _new_counts(self, server: Server) -> PromptTokens:
        """The counts of a server since they were last used. One that joined again counts from zero."""
        now, seen = server.continued, self._seen.get(server.endpoint, PromptTokens())
        if now.responses < seen.responses:
            return now
        return PromptTokens(now.responses - seen.responses, now.tokens - seen.tokens, now.cached - seen.cached)


def values(text: str, name: str) -> list[float]:
    """The values of a metric in Prometheus's text format, one for each set of labels; the server's program may have put
    its own name before it."""
    pattern = rf"^(?:\w+:)?{re.escape(name)}(?:\{{.*\}})? (\S+)"
    return [float(value) for value in re.findall(pattern, text, re.MULTILINE)]


async def read_metrics(http: aiohttp.ClientSession, endpoint: str) -> str | None:
    """A server's metrics in Prometheus's text format; None if it does not answer in time."""
    limit = aiohttp.ClientTimeout(total=READ_SECONDS)
    with suppress(aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        async with http.get(f"http://{endpoint}{METRICS}", timeout=limit) as response:
            if response.status == 200:
                return await response.text()
    return None
