"""What it costs in accuracy that a later turn uses a prefix that older weights computed:

    python -m tests.bench.bench_kept_prefixes

A real vLLM server of a tiny model with random weights. A prompt of 200 tokens is computed, all weights change by noise
of a fraction of their standard deviation, and 16 tokens are sampled after the same prompt: once with the cached keys
and values, once with those of the new weights. Both are compared with the new model's own log-probabilities, in
float32. The KL is Schulman's k3, as in `mismatch_kl`.
"""

import asyncio
import copy
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.rollout.server_client import Completion
from tests.bench.tables import markdown
from tests.support.servers.traffic import client_of
from tests.support.servers.vllm import (
    Model,
    Served,
    a_model,
    a_sender,
    expected_logprobs,
    model_directory,
    publish_to_all,
    starting_of,
    tiny_config,
)

CHANGES = (1e-3, 1e-2, 1e-1)
TRIALS, PROMPT_TOKENS, SAMPLED, VOCABULARY = 8, 200, 16, 17


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(Path(folder) / "model", tied=False)
        with starting_of(tiny_config(model), "127.0.0.3") as ready:
            server = ready()
            with a_sender([server]) as sender:
                rows = [row(server, sender, at, change) for at, change in enumerate(CHANGES)]
    print(markdown(["change of the weights", "kept: mean |Δ logprob|", "kept: KL", "computed again: KL"], rows))
    return 0


def row(server: Served, sender: WeightSender, number: int, change: float) -> list[str]:
    base, version = a_model(server.model, 1), 4 * TRIALS * number
    differences: dict[bool, list[float]] = {True: [], False: []}
    for keeps, found in differences.items():
        for trial in range(TRIALS):
            new, prompt = changed(base, change, trial), random_prompt(trial)
            publish_to_all(sender, version, base)
            completion = asyncio.run(two_turns(server, sender, version, new, prompt, keeps))
            found += (expected_logprobs(new, prompt, completion) - torch.tensor(completion.logprobs)).tolist()
            version += 2
    size = statistics.mean(map(abs, differences[True]))
    return [f"{change:g}", f"{size:.2g}", *(f"{divergence(differences[keeps]):.2g}" for keeps in (True, False))]


async def two_turns(
    server: Served, sender: WeightSender, version: int, new: Model, prompt: list[int], keeps: bool
) -> Completion:
    """The second turn, after an update between the two."""
    async with client_of([server], keeps_prefixes=keeps) as client:
        client.update(server.endpoint, version)
        await client.generate(prompt, n=1, temperature=1.0, max_tokens=1, stop_token_ids=[])
        await asyncio.to_thread(publish_to_all, sender, version + 1, new)
        client.update(server.endpoint, version + 1)
        (turn,) = await client.generate(
            prompt,
            n=1,
            temperature=1.0,
            max_tokens=SAMPLED,
            stop_token_ids=[],
            cached_on=server.endpoint,
            cached_at=version,
        )
        return turn


@torch.no_grad()
def changed(model: Model, fraction: float, seed: int) -> Model:
    new, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in new.parameters():
        parameter.add_(fraction * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return new


def random_prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
    return tokens


def divergence(differences: list[float]) -> float:
    values = torch.tensor(differences, dtype=torch.float64)
    return float((values.exp() - 1 - values).mean())


if __name__ == "__main__":
    sys.exit(main())
