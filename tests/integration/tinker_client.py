"""What tests do with the SDK's own client."""

import asyncio
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import tinker
from tinker import types

from tests.integration.tinker_server import TinkerServer
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import VOCABULARY

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


def forget_clients() -> None:
    """Have what the SDK leaves open, such as the connection of its first request, be closed without a warning.

    For after the end of the server. The SDK's event loop runs in a thread of its own, and its clients keep connections
    for as long as anything refers to a client. A connection that is collected while it is open causes a warning, in
    some later test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loop in [each for each in gc.get_objects() if isinstance(each, asyncio.AbstractEventLoop)]:
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_abort_connections(), loop).result(WAIT_SECONDS)
        gc.collect()


async def _abort_connections() -> None:
    """Close all connections of this event loop, and wait until the loop has closed their sockets."""
    loop = asyncio.get_running_loop()
    for each in gc.get_objects():
        if issubclass(type(each), asyncio.Transport) and each._loop is loop:
            each.abort()
    for _ in range(3):
        await asyncio.sleep(0)


@contextmanager
def client_of(server: TinkerServer, key: str = "") -> Iterator[tinker.ServiceClient]:
    """A client of the server, closed at the end."""
    client = tinker.ServiceClient(base_url=server.url, api_key=key or server.key)
    try:
        yield client
    finally:
        client.close("success").result()


def flood_of_a_dead_client(server: TinkerServer, route: str, count: int) -> None:
    """Returns once so many requests of `route` are stored, and the process that made them is dead."""
    command = [sys.executable, "-m", "tests.integration.tinker_flood", server.url, server.key, route, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
        assert client.stdout is not None
        log, stored = [], 0
        try:
            while stored < count and (line := client.stdout.readline()):
                log.append(line)
                stored += f"HTTP Response: POST {server.url}/api/v1/{route} " in line
        finally:
            client.kill()
    assert stored == count, "".join(log)


def usage(server: TinkerServer) -> dict[str, Any]:
    """What the server's own key used, over all clients."""
    asked = Request(f"{server.url}/api/v1/usage", headers={"X-API-Key": server.key})
    with urlopen(asked, timeout=WAIT_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def requests_done(server: TinkerServer) -> int:
    """How many requests of the server's own key have a result, over all clients."""
    return int(usage(server)["total"]["requests"])


def make_data(seed: int, loss: str = "cross_entropy", count: int = 6) -> list[types.Datum]:
    """Ragged sequences of random tokens, with what the loss reads."""
    draw = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(draw.integers(3, 12))
        tokens = draw.integers(0, VOCABULARY, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            inputs["weights"] = draw.normal(size=length).astype(np.float32)
        else:
            inputs["logprobs"] = (draw.normal(size=length) * 0.3 - 2.8).astype(np.float32)
            inputs["advantages"] = draw.normal(size=length).astype(np.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(length) >= length // 2).astype(np.float32)
        data.append(datum(tokens[:-1], inputs))
    return data


def datum(tokens: Any, inputs: Mapping[str, Any]) -> types.Datum:
    fields = {name: types.TensorData.from_numpy(np.asarray(value)) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints([int(each) for each in tokens]), loss_fn_inputs=fields)


def adam(lr: float = 1e-2, **changed: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=lr, **changed)


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(each["logprobs"].to_numpy()) for each in output.loss_fn_outputs]
