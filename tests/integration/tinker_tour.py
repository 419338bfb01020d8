"""A tour of the API with the public SDK alone, of whatever version: what it saw, as JSON in the last line.

TINKER_BASE_URL=… TINKER_API_KEY=… python tinker_tour.py
"""

import importlib.metadata
import io
import json
import random
import sys
import tarfile
import urllib.request
import warnings
from typing import Any

import tinker
from tinker import types

LOSSES = ("importance_sampling", "ppo", "cispo", "dro")


def datum(draw: random.Random, loss: str) -> types.Datum:
    tokens = [draw.randrange(17) for _ in range(draw.randrange(4, 12))]
    if loss == "cross_entropy":  # what can be learned in a few steps: a token follows itself
        tokens = tokens[:1] * len(tokens)
    length = len(tokens) - 1
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [1.0] * length
    else:
        inputs["logprobs"] = [-2.8 + 0.3 * draw.random() for _ in range(length)]
        inputs["advantages"] = [draw.random() - 0.5 for _ in range(length)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(trainer: Any, loss: str, seed: int, rate: float = 3e-2) -> float:
    """One step; the loss before it."""
    draw = random.Random(seed)
    passed = trainer.forward_backward([datum(draw, loss) for _ in range(8)], loss)
    stepped = trainer.optim_step(types.AdamParams(learning_rate=rate))
    value: float = passed.result().metrics["loss:sum"]
    stepped.result()
    return value


def downloaded(client: Any, trainer: Any) -> list[str]:
    """The files of an adapter that is taken away, as this version does it."""
    rest = client.create_rest_client()
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        path = trainer.save_weights_for_sampler("away").result().path
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
        with urllib.request.urlopen(url, timeout=60) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
            return sorted(each.name for each in tar.getmembers() if each.size)
    path = trainer.save_weights_external("away").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    found = []
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=60) as answer:
            found += [name] if answer.read() else []
    return sorted(found)


def main() -> dict[str, Any]:
    client = tinker.ServiceClient()
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
    seen: dict[str, Any] = {"models": [each.model_name for each in client.get_server_capabilities().supported_models]}
    seen["rank"] = trainer.get_info().lora_rank
    seen["sft"] = [train(trainer, "cross_entropy", 0) for _ in range(8)]
    seen["losses"] = [train(trainer, loss, 10 + at, 1e-3) for at, loss in enumerate(LOSSES)]
    state = trainer.save_state("half").result().path
    seen["next"] = train(trainer, "cross_entropy", 99), train(trainer, "cross_entropy", 98)
    resumed = client.create_training_client_from_state_with_optimizer(state)
    seen["resumed"] = train(resumed, "cross_entropy", 99), train(resumed, "cross_entropy", 98)
    fresh = client.create_training_client_from_state(state)
    seen["fresh"] = train(fresh, "cross_entropy", 99), train(fresh, "cross_entropy", 98)
    trainer.load_state(state).result()
    seen["loaded"] = train(trainer, "cross_entropy", 99)
    seen["files"] = downloaded(client, trainer)
    rest, model = client.create_rest_client(), trainer.get_info().model_id
    seen["listed"] = sorted(each.checkpoint_id for each in rest.list_checkpoints(model).result().checkpoints)
    rest.delete_checkpoint(model, "weights/half").result()
    seen["left"] = len(rest.list_checkpoints(model).result().checkpoints)
    try:
        trainer.forward_backward([datum(random.Random(0), "cross_entropy")], "nothing").result()
    except Exception as error:  # noqa: BLE001 (versions have different names for it)
        seen["refused"] = "expected one of" in str(error)
    seen["after"] = train(trainer, "cross_entropy", 97) > 0
    if hasattr(client, "close"):
        client.close("success").result()
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = main()
    print(importlib.metadata.version("tinker"), file=sys.stderr)
    print(json.dumps(found))
