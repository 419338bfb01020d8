"""What measurements of the API ask: the same work through the SDK and without it, from any number of clients."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tinker import types

from pipeline.config import RunConfig
from pipeline.tinker.generate_requests import request_body
from pipeline.tinker.sampling_limits import Limits
from pipeline.tinker.tinker_records import Adapter, Datum, Pass, Step
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.service.client_models import ServedModels

AHEAD, WARM = 2, 3
RATE = 1e-3
PROMPT = [1 + at % 16 for at in range(32)]


@dataclass(frozen=True)
class Training:
    """What each client's step trains: so many data of so many tokens, below a vocabulary, with an adapter of a rank."""

    data: int
    length: int
    vocabulary: int
    rank: int = 8

    def tokens(self, client: int) -> Any:
        """int64[data, length + 1]"""
        return np.random.default_rng(client).integers(1, self.vocabulary, (self.data, self.length + 1))

    @contextmanager
    def alone(
        self, dispatch: RankGroup, config: RunConfig, clients: int, folder: Path
    ) -> Iterator[Callable[[int], None]]:
        """What does so many steps of each client's adapter on the dispatch, in turns; warm."""
        passes = [_own_pass(self.tokens(client)) for client in range(clients)]
        step = Step(RATE, 0.9, 0.95, 1e-12, 0.0, 0.0)
        models = ServedModels(dispatch, config, folder, "one")
        for client in range(clients):
            models.create(str(client), Adapter(self.rank, seed=client))

        def train(times: int) -> None:
            for _ in range(times):
                for client, each in enumerate(passes):
                    models.run_pass(str(client), each)
                    models.step(str(client), step)

        train(WARM)
        yield train
        for client in range(clients):
            models.remove(str(client))

    def served(self, opened: Sequence[Any], base: str) -> Callable[[int], None]:
        """What does so many steps of each of these service clients, from the first request to the last result; warm."""
        making = (
            each.create_lora_training_client(base_model=base, rank=self.rank, seed=client).result()
            for client, each in enumerate(opened)
        )
        trainers = list(making)
        data = [[_datum(row) for row in self.tokens(client)] for client in range(len(opened))]

        def train_all(steps: int) -> None:
            with ThreadPoolExecutor(len(trainers)) as threads:
                list(threads.map(_train, trainers, data, [steps] * len(trainers)))

        train_all(WARM)
        return train_all


def _own_pass(rows: Any) -> Pass:
    length = rows.shape[1] - 1
    at, ones = np.arange(length).tobytes(), np.ones(length, np.float32).tobytes()
    data = [
        Datum(row[:-1].astype("<i4").tobytes(), at, row[1:].astype("<i4").tobytes(), {"weights": ones}) for row in rows
    ]
    return Pass(tuple(data), "cross_entropy", {}, backward=True)


def _datum(row: Any) -> types.Datum:
    inputs = {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)}
    fields = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs=fields)


def _train(trainer: Any, data: list[types.Datum], steps: int) -> None:
    """So many steps, some of them under way."""
    under_way: deque[Any] = deque()
    for _ in range(steps):
        under_way.append(trainer.forward_backward(data, "cross_entropy"))
        under_way.append(trainer.optim_step(types.AdamParams(learning_rate=RATE)))
        while len(under_way) > 2 * AHEAD:
            under_way.popleft().result()
    for each in under_way:
        each.result()


@dataclass(frozen=True)
class Sampling:
    """So many requests of all clients together, each for so many samples of so many tokens."""

    requests: int
    samples: int
    tokens: int

    def raw(self, endpoint: str, password: str, model: str, clients: int) -> float:
        """Seconds for all, asked of the server itself."""
        return asyncio.run(self._raw(endpoint, password, model, clients))

    async def _raw(self, endpoint: str, password: str, model: str, clients: int) -> float:
        body: dict[str, Any] = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}}
        body |= {"num_samples": self.samples, "sampling_params": {"max_tokens": self.tokens, "stop": []}}
        asked, left = (
            request_body(body, model, Limits(len(PROMPT) + self.tokens, self.samples)),
            iter(range(self.requests)),
        )
        headers = {"Authorization": f"Bearer {password}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask() -> None:
                for _ in left:
                    async with http.post(f"http://{endpoint}/inference/v1/generate", json=asked) as answer:
                        answer.raise_for_status()
                        assert len((await answer.json())["choices"]) == self.samples

            started = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(clients * AHEAD)))
            return time.perf_counter() - started

    def served(self, samplers: Sequence[Any]) -> float:
        """Seconds from the first request of any of these sampling clients to the last answer of all."""
        left = iter(range(self.requests))
        prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=self.tokens, stop=[])

        def ask(sampler: Any) -> None:
            for _ in left:
                assert len(sampler.sample(prompt, self.samples, params).result().sequences) == self.samples

        asking = [sampler for sampler in samplers for _ in range(AHEAD)]
        started = time.perf_counter()
        with ThreadPoolExecutor(len(asking)) as threads:
            list(threads.map(ask, asking))
        return time.perf_counter() - started


def folder_of(weights: Path, path: str) -> str:
    """The folder below `weights` of an adapter that was saved under this path."""
    (version,) = (weights / path.removeprefix("tinker://").replace(":", "-")).iterdir()
    return str(version.relative_to(weights))
