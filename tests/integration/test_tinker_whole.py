"""Whole models and several bases through the API, with the SDK's own client and a vLLM server for each."""

import json
import shutil
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

from pipeline.train.service.random_base import write_base
from tests.integration.tinker_client import adam, client_of, forget_clients, make_data
from tests.integration.tinker_server import TinkerServer, serving_samples
from tests.integration.tinker_truth import Truth
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import weights
from tests.support.servers.vllm import TINY

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
PROMPT = [1, 5, 9, 3, 12]
OTHER = "org/other"
CLOSE = 2e-3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """A vLLM server is for whole models, and one for the other base, which has fewer layers; none for the run's."""
    root = tmp_path_factory.mktemp("whole")
    (root / "shape").mkdir()
    shape = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 2, "layer_types": None}
    for file in TINY.iterdir():
        shutil.copy(file, root / "shape")
    (root / "shape" / "config.json").write_text(json.dumps(shape))
    write_base(root / "shape", root / "other", seed=9)
    pools = {"whole_models": True, "whole_servers": 1, "bases": {OTHER: str(root / "other")}, "base_servers": 1}
    with serving_samples(root, ["127.0.0.11", "127.0.0.12"], **pools) as (started, _):
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
def logprobs_of(saved: Path | Any) -> np.ndarray[Any, Any]:
    """What a model, or one in a folder, says of the prompt's tokens, in float64."""
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64) if isinstance(saved, Path) else saved
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


def test_adapters_of_another_base_are_trained_and_sampled_beside_those_of_the_runs_own(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    assert {"tiny", OTHER} <= {each.model_name for each in client.get_server_capabilities().supported_models}
    own = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    other = client.create_lora_training_client(base_model=OTHER, rank=4, seed=1).result()
    data = other.get_info().model_data
    assert (data.model_name, data.tokenizer_id) == (OTHER, str(server.root / "other"))
    for seed in range(2):
        for trainer in (own, other):
            train(trainer, seed)
    prompt = types.ModelInput.from_ints(PROMPT)
    untrained = client.create_sampling_client(base_model=OTHER).compute_logprobs(prompt).result()
    np.testing.assert_allclose(untrained[1:], logprobs_of(server.root / "other"), atol=CLOSE)
    found = other.save_weights_and_get_sampling_client().compute_logprobs(prompt).result()
    folder = folder_of(server, other.save_weights_for_sampler("other").result().path)
    np.testing.assert_allclose(found[1:], logprobs_of(Truth(server.root / "other", folder).model), atol=CLOSE)
    assert np.abs(np.array(found[1:]) - untrained[1:]).max() > 2 * CLOSE
    sampler = client.create_sampling_client(base_model="tiny")
    with pytest.raises(tinker.RequestFailedError, match="no server here samples from the run's base"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()


def test_a_state_belongs_to_its_base_and_a_killed_trainer_has_both_again(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    ends = []
    for is_killed in (False, True):
        trainer = client.create_lora_training_client(base_model=OTHER, rank=4, seed=2).result()
        train(trainer, 1)
        if is_killed:
            server.kill_trainer()
            server.start_trainer()
        train(trainer, 2)
        ends.append(weights(folder_of(server, trainer.save_weights_for_sampler("end").result().path)))
    for name, tensor in ends[0].items():
        np.testing.assert_array_equal(tensor, ends[1][name], err_msg=name)
    state = trainer.save_state("state").result().path
    own = client.create_lora_training_client(base_model="tiny", rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=f"rank 4 on {OTHER}, not rank 4"):
        own.load_state(state).result()
    with pytest.raises(tinker.BadRequestError, match=f"was trained from {OTHER}"):
        client.create_training_client_from_state(state, base_model="tiny").result()
    assert client.create_training_client_from_state(state).result().get_info().model_data.model_name == OTHER
    whole = client.create_lora_training_client(base_model=OTHER, rank=0).result()
    with pytest.raises(tinker.RequestFailedError, match="no server here samples from whole models of 'org/other'"):
        whole.save_weights_for_sampler("whole").result()
