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
from statistics import mean
from typing import Any

import tinker
from tinker import types

LOSSES = ("importance_sampling", "ppo", "cispo", "dro")
RL_LOSSES = LOSSES[:2]
SFT_STEPS, SFT_DATA = 30, 32
RL_STEPS, RL_RATE = 14, 1e-3
PROMPTS, SAMPLES = 24, 8


def datum(draw: random.Random, loss: str) -> types.Datum:
    """A random sequence, with what the loss reads."""
    tokens = [draw.randrange(17) for _ in range(draw.randrange(4, 12))]
    length = len(tokens) - 1
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [1.0] * length
    else:
        inputs["logprobs"] = [-2.8 + 0.3 * draw.random() for _ in range(length)]
        inputs["advantages"] = [draw.random() - 0.5 for _ in range(length)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def made(client: Any) -> Any:
    """A client that newer versions give as a future.

    Using it as if it were none, as 0.38 allows, is for one thread: its event loop and `get_server_capabilities` may
    wait for each other for ever."""
    return client.result() if hasattr(client, "result") else client


def train(trainer: Any, loss: str, data: list[types.Datum], rate: float = 3e-3) -> float:
    """One step; the loss before it."""
    passed = trainer.forward_backward(data, loss)
    stepped = trainer.optim_step(types.AdamParams(learning_rate=rate))
    value: float = passed.result().metrics["loss:sum"]
    stepped.result()
    return value


def train_at_random(trainer: Any, loss: str, seed: int) -> float:
    draw = random.Random(seed)
    return train(trainer, loss, [datum(draw, loss) for _ in range(8)])


def drawn_sum(draw: random.Random) -> tuple[str, str]:
    """An addition of two digits, and its answer."""
    one, other = draw.randrange(10), draw.randrange(10)
    return f"^{one}+{other}=", f"{one + other}$"


def shown(tokenizer: Any, prompt: str, answer: str) -> types.Datum:
    """An addition with its answer, of which the answer is learned."""
    asked, told = tokenizer.encode(prompt), tokenizer.encode(answer)
    tokens, weights = asked + told, [0.0] * (len(asked) - 1) + [1.0] * len(told)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def sampled(prompt: list[int], sequence: Any, advantage: float) -> types.Datum:
    """What a policy sampled after a prompt."""
    tokens, before = prompt + list(sequence.tokens), [0.0] * (len(prompt) - 1)
    count = len(sequence.tokens)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": before + list(sequence.logprobs),
        "advantages": before + [advantage] * count,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def reinforce(trainer: Any, tokenizer: Any, loss: str, steps: int) -> list[float]:
    """So many steps of RL on the same additions: the mean reward of each.

    A sample earns 1 for the right answer, else 0; its advantage is what it earns above the mean of its prompt's."""
    draw, earned = random.Random(1), []
    asked = [drawn_sum(draw) for _ in range(PROMPTS)]
    params = types.SamplingParams(max_tokens=4)
    for _ in range(steps):
        sampler = made(trainer.save_weights_and_get_sampling_client())
        prompts = [tokenizer.encode(prompt) for prompt, _ in asked]
        answers = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, (_, right), answer in zip(prompts, asked, answers, strict=True):
            sequences = answer.result().sequences
            own = [float(list(each.tokens) == tokenizer.encode(right)) for each in sequences]
            data += [sampled(prompt, each, reward - mean(own)) for each, reward in zip(sequences, own, strict=True)]
            rewards += own
        train(trainer, loss, data, RL_RATE)
        earned.append(mean(rewards))
    return earned


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
    trainer = made(client.create_lora_training_client(base_model="tiny", rank=4, seed=3))
    seen: dict[str, Any] = {"models": [each.model_name for each in client.get_server_capabilities().supported_models]}
    seen["rank"] = trainer.get_info().lora_rank
    tokenizer, draw = trainer.get_tokenizer(), random.Random(0)
    seen["sft"] = [
        train(trainer, "cross_entropy", [shown(tokenizer, *drawn_sum(draw)) for _ in range(SFT_DATA)])
        for _ in range(SFT_STEPS)
    ]
    learned = trainer.save_state("learned").result().path
    seen["rewards"] = {
        loss: reinforce(made(client.create_training_client_from_state(learned)), tokenizer, loss, RL_STEPS)
        for loss in RL_LOSSES
    }
    seen["losses"] = [train_at_random(trainer, loss, 10 + at) for at, loss in enumerate(LOSSES)]
    state = trainer.save_state("half").result().path
    seen["next"] = train_at_random(trainer, "cross_entropy", 99), train_at_random(trainer, "cross_entropy", 98)
    resumed = made(client.create_training_client_from_state_with_optimizer(state))
    seen["resumed"] = train_at_random(resumed, "cross_entropy", 99), train_at_random(resumed, "cross_entropy", 98)
    fresh = made(client.create_training_client_from_state(state))
    seen["fresh"] = train_at_random(fresh, "cross_entropy", 99), train_at_random(fresh, "cross_entropy", 98)
    trainer.load_state(state).result()
    seen["loaded"] = train_at_random(trainer, "cross_entropy", 99)
    seen["files"] = downloaded(client, trainer)
    rest, model = client.create_rest_client(), trainer.get_info().model_id
    seen["listed"] = sorted(each.checkpoint_id for each in rest.list_checkpoints(model).result().checkpoints)
    rest.delete_checkpoint(model, "weights/half").result()
    seen["left"] = len(rest.list_checkpoints(model).result().checkpoints)
    try:
        trainer.forward_backward([datum(random.Random(0), "cross_entropy")], "nothing").result()
    except Exception as error:  # noqa: BLE001 (versions have different names for it)
        seen["refused"] = "expected one of" in str(error)
    seen["after"] = train_at_random(trainer, "cross_entropy", 97) > 0
    if hasattr(client, "close"):
        client.close("success").result()
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = main()
    print(importlib.metadata.version("tinker"), file=sys.stderr)
    print(json.dumps(found))
