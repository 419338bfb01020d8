"""Whole models through the API: trained, saved for sampling, and sampled from by vLLM, with the SDK's own client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.integration.tinker_client import adam, client_of, forget_clients, make_data
from tests.integration.tinker_server import TinkerServer, serving_samples
from tests.patience import WAIT_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
PROMPT = [1, 5, 9, 3, 12]
CLOSE = 2e-3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """Its only vLLM server is for whole models."""
    root = tmp_path_factory.mktemp("whole")
    with serving_samples(root, ["127.0.0.11"], whole_models=True, whole_servers=1) as (started, _):
        yield started
    forget_clients()


@pytest.fixture
def client(server: TinkerServer) -> Iterator[tinker.ServiceClient]:
    with client_of(server) as opened:
        yield opened


def whole_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=0).result()


def train(trainer: tinker.TrainingClient, *seeds: int) -> None:
    for seed in seeds:
        passed, stepped = trainer.forward_backward(make_data(seed), "cross_entropy"), trainer.optim_step(adam(2e-3))
        passed.result()
        stepped.result()


def folder_of(server: TinkerServer, path: str) -> Path:
    (version,) = (server.api / "weights" / path.removeprefix("tinker://").replace(":", "-")).iterdir()
    return version


@torch.no_grad()
def logprobs_of(folder: Path) -> np.ndarray[Any, Any]:
    """What a saved model says of the prompt's tokens, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    whole = model(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)[:-1]
    return np.asarray(whole.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0])


def test_whole_models_are_sampled_as_they_were_saved_beside_each_other(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    prompt = types.ModelInput.from_ints(PROMPT)
    samplers, expected = [], []
    for number in range(2):
        trainer = whole_model(client)
        assert not trainer.get_info().is_lora
        train(trainer, number, number + 10)
        samplers.append(trainer.save_weights_and_get_sampling_client())
        expected.append(logprobs_of(folder_of(server, trainer.save_weights_for_sampler("now").result().path)))
        train(trainer, 20)
    assert np.abs(expected[0] - expected[1]).max() > 20 * CLOSE, "the models differ enough to be told apart"
    asked = [(number, sampler.compute_logprobs(prompt)) for _ in range(3) for number, sampler in enumerate(samplers)]
    for number, future in asked:
        np.testing.assert_allclose(future.result()[1:], expected[number], atol=CLOSE)


def test_openais_client_asks_a_whole_model_by_its_path(server: TinkerServer, client: tinker.ServiceClient) -> None:
    trainer = whole_model(client)
    train(trainer, 1)
    path = trainer.save_weights_for_sampler("asked").result().path
    expected = logprobs_of(folder_of(server, path))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, timeout=WAIT_SECONDS) as asking:
        completion = asking.completions.create(
            model=path, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0.0
        )
    (choice,) = completion.choices
    assert completion.model == path
    assert choice.logprobs is not None
    np.testing.assert_allclose(np.array(choice.logprobs.token_logprobs[1 : len(PROMPT)], float), expected, atol=CLOSE)


def test_a_whole_model_goes_on_from_its_state(server: TinkerServer, client: tinker.ServiceClient) -> None:
    trainer = whole_model(client)
    train(trainer, 3)
    state = trainer.save_state("three").result().path
    resumed = client.create_training_client_from_state_with_optimizer(state).result()
    for each in (trainer, resumed):
        train(each, 4)
    ends = [folder_of(server, each.save_weights_for_sampler("end").result().path) for each in (trainer, resumed)]
    np.testing.assert_array_equal(*(logprobs_of(end) for end in ends))
