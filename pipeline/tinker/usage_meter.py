"""The usage of each key: tokens, requests and seconds, by day.

Owns the counts and their facts in the store. Promises that counts survive restarts; a killed gateway loses at most the
counts since the last `flush`. A request counts once, with its result: work that is repeated after the loss of a
trainer, and failed requests, count nothing. Days are those of UTC.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from pipeline.tinker import durable_store
from pipeline.tinker.api_errors import OverLimitError
from pipeline.tinker.durable_store import Store

KIND = "usage"
KEPT_DAYS = 400


class Usage(msgspec.Struct):
    """Amounts.

    Attributes:
        requests: those with a result: passes, steps, saves, samples, completions.
        prompt_tokens: of samples and completions, once for each request.
        sampled_tokens: that servers generated.
        trained_tokens: input tokens of passes with gradients.
        scored_tokens: input tokens of passes without.
        trainer_seconds: between the hand-out of a request to the trainer and its result.
        sampling_seconds: between the question to a server and its answer. Requests that a server works on at once
            add up.
    """

    requests: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    scored_tokens: int = 0
    trainer_seconds: float = 0.0
    sampling_seconds: float = 0.0

    def add(self, other: "Usage") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class UsageMeter:
    """The counts of all names, from the store at its start."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._days = {key: msgspec.msgpack.decode(body, type=Usage) for key, body in store.facts(KIND)}
        """By "<day> <name>", as 2026-11-25 ada."""
        self._changed: set[str] = set()

    def count(self, owner: str, usage: Usage) -> None:
        """Add to today's amounts of a name."""
        key = f"{self._day()} {owner}"
        self._days.setdefault(key, Usage()).add(usage)
        self._changed.add(key)

    def owners(self) -> list[str]:
        return sorted({key.partition(" ")[2] for key in self._days})

    def days(self, owner: str) -> dict[str, Usage]:
        """The amounts of a name by day, in order."""
        own = (key.partition(" ") for key in sorted(self._days))
        return {day: self._days[f"{day} {name}"] for day, _, name in own if name == owner}

    def total(self, owner: str) -> Usage:
        """The sum of all days that are kept."""
        return _sum(self.days(owner).values())

    async def flush(self) -> None:
        """Have all counts in the store, without days older than `KEPT_DAYS`. A full store keeps them for the next."""
        oldest = self._day(days_ago=KEPT_DAYS)
        old = [key for key in self._days if key < oldest]
        changed, self._changed = self._changed.difference(old), set()
        changes = [durable_store.fact(KIND, key, msgspec.msgpack.encode(self._days[key])) for key in changed]
        for key in old:
            del self._days[key]
        try:
            if changes or old:
                await self._store.keep(*changes, *(durable_store.no_fact(KIND, key) for key in old))
        except OverLimitError:
            self._changed |= changed

    def _day(self, days_ago: int = 0) -> str:
        return (datetime.fromtimestamp(self._clock(), UTC) - timedelta(days=days_ago)).date().isoformat()


def usage_of_answer(usage: object, seconds: float) -> Usage:
    """The amounts in the `usage` field of an answer in OpenAI's form; one that is torn has none."""
    counts = Usage(requests=1, sampling_seconds=seconds)
    with suppress(msgspec.ValidationError):
        counted = msgspec.convert(usage, type=_AnswerUsage)
        counts.prompt_tokens, counts.sampled_tokens = counted.prompt_tokens, counted.completion_tokens
    return counts


def usage_of_sample(request: Mapping[str, Any], answer: Mapping[str, Any], seconds: float) -> Usage:
    """The amounts of a request to sample and its answer, both in vLLM's form."""
    sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
    return Usage(1, len(request["token_ids"]), sampled, sampling_seconds=seconds)


class _AnswerUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


def _sum(usages: Iterable[Usage]) -> Usage:
    total = Usage()
    for usage in usages:
        total.add(usage)
    return total
