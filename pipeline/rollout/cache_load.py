"""The load of the servers' KV caches, from their metrics and their responses.

Owns the reading of a server's metrics, and the counts of a period. Promises that a server which does not answer in time
changes nothing. Must not know the controller that uses the load (`concurrency_control`).
"""

import asyncio
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import aiohttp

from pipeline.rollout.server_client import Server

METRICS = "/metrics"
READ_SECONDS = 5.0
_USAGE, _PREEMPTIONS = "kv_cache_usage_perc", "num_preemptions_total"
_CACHE_CONFIG = re.compile(r"cache_config_info\{.*\}")
_NO_CACHE = 'enable_prefix_caching="False"'
_BLOCK = re.compile(r'\b(?:block_size|cache_hit_alignment_tokens)="(\d+)"')


@dataclass(frozen=True)
class CacheLoad:
    """The load of a period: the fields of `concurrency_control.ServerLoad` that servers determine."""

    answered: int = 0
    continued: int = 0
    repeated: int = 0
    cached: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0


class CacheWatch:
    """Reads the load of each period, which began with the reading before."""

    def __init__(self) -> None:
        self._preemptions: dict[str, int] = {}
        self._blocks: dict[str, int | None] = {}
        self._answered: WeakKeyDictionary[Server, int] = WeakKeyDictionary()

    async def load(self, http: aiohttp.ClientSession, servers: Sequence[Server]) -> CacheLoad:
        metrics = await asyncio.gather(*(read_metrics(http, server.endpoint) for server in servers))
        usage, preemptions = 0.0, 0
        for server, text in zip(servers, metrics, strict=True):
            if text is not None:
                usage = max(usage, max(values(text, _USAGE), default=0.0))
                total = int(sum(values(text, _PREEMPTIONS)))
                preemptions += max(0, total - self._preemptions.get(server.endpoint, total))
                self._preemptions[server.endpoint] = total
                self._blocks[server.endpoint] = block_size(text)
        answered = continued = repeated = cached = 0
        for server in servers:
            answered += server.prompts.samples - self._answered.get(server, 0)
            self._answered[server] = server.prompts.samples
            block, prompts = self._blocks.get(server.endpoint, 1), server.repeated
            server.repeated = []
            for prompt in prompts:
                continued += prompt.samples
                # Only whole blocks are cached: a prompt repeats up to a block more than can be found.
                in_blocks = max(0, prompt.tokens - block) if block else 0
                repeated += in_blocks
                cached += min(prompt.cached, in_blocks)
        return CacheLoad(answered, continued, repeated, cached, usage, preemptions)


def values(text: str, name: str) -> list[float]:
    """The values of a metric in Prometheus's text format, one for each set of labels; the server's program may have put
    its own name before it. A value that is no finite number, as the format permits (`NaN`, `+Inf`), is left out."""
    pattern = rf"^(?:\w+:)?{re.escape(name)}(?:\{{.*\}})? (\S+)"
    return [value for text in re.findall(pattern, text, re.MULTILINE) if (value := _finite(text)) is not None]


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def block_size(text: str) -> int | None:
    """Tokens of a block of the prefix cache, or the multiple of tokens at which hits end, if that is larger. 1 if the
    metrics have neither; None for a server without a prefix cache."""
    labels = _CACHE_CONFIG.search(text)
    if labels is None:
        return 1
    return None if _NO_CACHE in labels[0] else max(map(int, _BLOCK.findall(labels[0])), default=1)


async def read_metrics(http: aiohttp.ClientSession, endpoint: str) -> str | None:
    """A server's metrics in Prometheus's text format; None if it does not answer in time."""
    limit = aiohttp.ClientTimeout(total=READ_SECONDS)
    with suppress(aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        async with http.get(f"http://{endpoint}{METRICS}", timeout=limit) as response:
            if response.status == 200:
                return await response.text()
    return None
