"""Requests without a break while weights change, and what their samples must be like.

traffic, models = run_traffic(servers, first, second)      # weights A, B, A, B
check_purity(traffic, models)
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.utils.waiting import Deadline
from tests.patience import WAIT_SECONDS
from tests.support.servers.vllm import (
    SECRET,
    Model,
    Served,
    a_sender,
    distance_to,
    expected_of_all,
    publish_to_all,
    straddles,
)

PROBE = [1, 5, 6, 7, 11, 4]
CLOSE, APART = 3e-4, 1e-2
"""Bounds of `distance` to the weights that a server has, and to others. Each side rounds to float32: of 5,120 sampled
texts, log-probabilities of the adapted model differed from those in float64 by 9e-6 in the mean and 1.2e-4 at most."""


def client_of(servers: Sequence[Served], **settings: int) -> InferenceClient:
    return InferenceClient([server.endpoint for server in servers], SECRET, 60, **settings)


async def sample(client: InferenceClient, tokens: int = 24, prompt: Sequence[int] = PROBE) -> Completion:
    """One sample that never ends early."""
    (completion,) = await client.generate(prompt, n=1, temperature=1.0, max_tokens=tokens, stop_token_ids=[])
    return completion


def probe(server: Served, version: int) -> Completion:
    """A sample of one server, which must serve `version`."""

    async def ask() -> Completion:
        async with client_of([server]) as client:
            client.update(server.endpoint, version)
            return await asyncio.wait_for(sample(client), WAIT_SECONDS)

    return asyncio.run(ask())


@dataclass
class Traffic:
    """Requests without a break, and which version was acknowledged when each was issued."""

    servers: Sequence[Served]
    tokens: int = 32
    acknowledged: int = 0
    issued: int = 0
    done: list[tuple[int, Completion]] = field(default_factory=list)
    retries: int = 0

    async def during(self, sender: WeightSender, versions: Sequence[tuple[int, Model]]) -> None:
        """Keep 16 requests in flight while these versions are published, each after 32 more samples."""
        async with client_of(self.servers, max_lag=len(versions)) as client:
            self._tell(client, sender)
            self._running = True
            requests = [asyncio.create_task(self._ask(client)) for _ in range(16)]
            for version, model in versions:
                await self._more(32)
                await asyncio.to_thread(publish_to_all, sender, version, model)
                self.acknowledged = version
                self._tell(client, sender)
            await self._more(32)
            self._running = False
            await asyncio.wait_for(asyncio.gather(*requests), WAIT_SECONDS)
            self.retries = client.retries.total()

    def _tell(self, client: InferenceClient, sender: WeightSender) -> None:
        for server, version in sender.versions().items():
            client.update(server, version)

    async def _more(self, samples: int) -> None:
        enough, deadline = len(self.done) + samples, Deadline("samples", 60)
        while len(self.done) < enough:
            assert not deadline.passed
            await asyncio.sleep(0.005)

    async def _ask(self, client: InferenceClient) -> None:
        while self._running:
            acknowledged = self.acknowledged
            self.issued += 1
            self.done.append((acknowledged, await sample(client, self.tokens)))


def run_traffic(
    servers: Sequence[Served], first: Model, second: Model, tokens: int = 32, **settings: Any
) -> tuple[Traffic, dict[int, Model]]:
    """Traffic during weights A, B, A, B, and the model of each version; `settings` are those of `a_sender`."""
    models = {version: (first, second)[version % 2] for version in range(5)}
    traffic = Traffic(servers, tokens)
    with a_sender(servers, **settings) as sender:
        publish_to_all(sender, 0, models[0])
        asyncio.run(traffic.during(sender, [(version, models[version]) for version in range(1, 5)]))
    return traffic, models


def check_purity(traffic: Traffic, models: dict[int, Model], *, kept: bool = True) -> None:
    """No request is lost, none sees weights older than those acknowledged when it was issued, no label lies: a sample
    of one version is of that model, one of two is of the older model first and of the newer one from some token on.

    `kept`: requests in flight go on with the keys and values that they have.
    """
    assert len(traffic.done) == traffic.issued
    for acknowledged, completion in traffic.done:
        assert len(completion.tokens) == traffic.tokens
        assert completion.version_min >= acknowledged
    expected = {version: _expected(traffic, version, model) for version, model in models.items()}
    for number, (_, completion) in enumerate(traffic.done):
        first, last = completion.version_min, completion.version_max
        if first == last:
            assert distance_to(expected[first][number], completion) < CLOSE
        elif last == first + 1:
            both = expected[first][number], expected[last][number]
            older, newer = models[first], models[last]
            assert straddles(older, newer, PROBE, completion, CLOSE, kept=kept, expected=both)


def _expected(traffic: Traffic, version: int, model: Model) -> dict[int, Tensor]:
    """The log-probabilities by the model of this version, for each completion that has tokens of it, by its index."""
    of_version = {
        number: completion
        for number, (_, completion) in enumerate(traffic.done)
        if version in (completion.version_min, completion.version_max)
    }
    return dict(zip(of_version, expected_of_all(model, PROBE, list(of_version.values())), strict=True))


def straddling(traffic: Traffic) -> list[Completion]:
    return [completion for _, completion in traffic.done if completion.version_min < completion.version_max]


async def lose_a_server(servers: Sequence[Served], victim: Served) -> tuple[list[Completion], int]:
    """The samples of 32 requests, half of which run on a server when it is killed; how many were tried again."""
    async with client_of(servers) as client:
        for server in servers:
            client.update(server.endpoint, 1)
        requests = [asyncio.create_task(sample(client, tokens=200)) for _ in range(32)]
        while len(client._servers[victim.endpoint].running) < 16:
            await asyncio.sleep(0)
        await asyncio.to_thread(victim.child.kill)
        completions = await asyncio.wait_for(asyncio.gather(*requests), WAIT_SECONDS)
        return list(completions), client.retries["disconnected"]
