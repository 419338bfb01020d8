"""Speculative decoding on real vLLM servers: samples have the policy's distribution, log-probabilities and versions."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pipeline.inference.vllm.compact_logprobs import SWITCH
from pipeline.rollout.draft_acceptance import AcceptanceRate
from pipeline.rollout.server_client import Completion
from tests.patience import WAIT_SECONDS
from tests.support.servers.traffic import CLOSE, check_purity, client_of, run_traffic, straddling
from tests.support.servers.vllm import (
    FORKS,
    ROOT,
    UNTOLD,
    Model,
    Served,
    a_model,
    a_sender,
    distance_to,
    expected_of_all,
    model_directory,
    publish_to_all,
    starting_of,
    tiny_config,
    two_models,
)

pytestmark = pytest.mark.integration

REPEATED = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
"""A prompt whose last tokens occurred before, so the first step already has drafts."""
SAMPLES, MOST = 4000, 250
"""Samples of a distribution, and of one request, which vLLM limits."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """A server that drafts by lookup, with its engine in another process and a release that reports no versions (as
    vLLM 0.25 on GPUs); and one that drafts with a model whose weights are those of seed 1."""
    folder = tmp_path_factory.mktemp("servers")
    directory, drafts = model_directory(folder / "policy", tied=False), folder / "drafts"
    a_model(directory, 1).save_pretrained(drafts)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    untold = {SWITCH: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": path} | FORKS
    lookup = tiny_config(directory, speculation={"method": "ngram"})
    drafting = tiny_config(directory, speculation={"method": "draft", "model": str(drafts), "tokens": 3})
    with ExitStack() as started:
        ready = [
            started.enter_context(starting_of(lookup, "127.0.0.3", untold, module=UNTOLD)),
            started.enter_context(starting_of(drafting, "127.0.0.4")),
        ]
        yield [wait() for wait in ready]


def samples_of(
    server: Served, version: int, n: int, tokens: int, temperature: float = 1.0
) -> tuple[list[Completion], float | None]:
    """`n` samples, and the accepted fraction of the tokens that the server drafted for them."""

    async def ask() -> tuple[list[Completion], float | None]:
        async with client_of([server]) as client:
            client.update(server.endpoint, version)
            await client.read_drafts()
            sampling = {"temperature": temperature, "max_tokens": tokens, "stop_token_ids": []}
            requests = [client.generate(REPEATED, n=min(n, MOST), **sampling) for _ in range(-(-n // MOST))]
            groups = await asyncio.wait_for(asyncio.gather(*requests), WAIT_SECONDS)
            await client.read_drafts()
            fraction = AcceptanceRate().take(client.numbers())
            return [each for group in groups for each in group], fraction

    return asyncio.run(ask())


def farthest(model: Model, completions: Sequence[Completion]) -> float:
    """Largest difference between the servers' log-probabilities at temperature 1 and the model's."""
    expected = expected_of_all(model, REPEATED, completions)
    return max(distance_to(each, completion) for each, completion in zip(expected, completions, strict=True))


@pytest.mark.parametrize("index", [0, 1], ids=["lookup", "draft model"])
def test_log_probabilities_are_the_policys_and_every_token_has_its_version(servers: list[Served], index: int) -> None:
    first, second = (a_model(servers[0].model, seed) for seed in (1, 2))
    with a_sender([servers[index]]) as sender:
        for version, model in enumerate((first, second), 1):
            publish_to_all(sender, version, model)
            completions, _ = samples_of(servers[index], version, 32, 40)
            assert farthest(model, completions) < CLOSE
            assert {(each.version_min, each.version_max) for each in completions} == {(version, version)}
            assert {len(each.tokens) for each in completions} == {40}


@pytest.mark.parametrize("index", [0, 1], ids=["lookup", "draft model"])
def test_samples_have_the_policys_distribution(servers: list[Served], index: int) -> None:
    """The first token is drafted from the prompt, the second from what was sampled. Pearson's statistic over k tokens
    has mean k - 1; one in a million is above k + 5 √(2k) + 12 or so."""
    model = a_model(servers[0].model, 2)
    with a_sender([servers[index]]) as sender:
        publish_to_all(sender, 1, model)
        completions, _ = samples_of(servers[index], 1, SAMPLES, 2)
    for position, expected in enumerate(_marginals(model)):
        seen = Counter(each.tokens[position] for each in completions)
        likely = [token for token, chance in enumerate(expected) if SAMPLES * chance > 5]
        chances = [*(expected[token] for token in likely), 1 - sum(expected[token] for token in likely)]
        counts = [*(seen[token] for token in likely), SAMPLES - sum(seen[token] for token in likely)]
        statistic = sum(
            (count - SAMPLES * chance) ** 2 / (SAMPLES * chance) for count, chance in zip(counts, chances, strict=True)
        )
        assert len(likely) > 10
        assert statistic < len(likely) + 5 * (2 * len(likely)) ** 0.5 + 12


@torch.no_grad()
def _marginals(model: Model) -> list[list[float]]:
    """The chances of each token at the first and at the second position after the prompt."""
    first = model(torch.tensor([REPEATED])).logits[0, -1].float().softmax(-1)
    continued = torch.tensor([[*REPEATED, token] for token in range(len(first))])
    second = first @ model(continued).logits[:, -1].float().softmax(-1)
    return [first.tolist(), second.tolist()]


def test_requests_in_flight_go_on_through_an_update(servers: list[Served]) -> None:
    """Every token has the log-probability of the version that is reported for it, drafted or not."""
    traffic, models = run_traffic(servers[:1], *two_models(servers[0].model))
    check_purity(traffic, models)
    assert straddling(traffic), "no request was in flight during an update"


def test_the_smaller_models_weights_are_loaded_and_stay(servers: list[Served], tmp_path: Path) -> None:
    """Drafts of a model equal to the policy are accepted with the chance of the likeliest token, also after updates of
    the policy in between; those of another one far less often. At a low temperature the chance is near 1."""
    same, other = (a_model(servers[0].model, seed) for seed in (1, 2))
    server = servers[1]
    fractions = []
    with a_sender([server]) as sender:
        for version, model in enumerate((other, same), 1):
            publish_to_all(sender, version, model)
            _, fraction = samples_of(server, version, 16, 60, temperature=0.05)
            assert fraction is not None
            fractions.append(fraction)
    assert fractions[0] < 0.3
    assert fractions[1] > 0.7
