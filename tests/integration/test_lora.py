"""Adapters on their way from a trainer to a real vLLM server, and what it serves then."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import LoraConfig, ModelConfig
from pipeline.errors import RolloutError, WeightSyncError
from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient
from pipeline.rollout.generate_wire import ROUTE, GenerationRequest
from pipeline.rollout.server_client import Completion
from pipeline.train.model.lora import add_adapters, is_trained
from pipeline.utils.waiting import Deadline, wait_for
from tests.support.models.written import save_whole_adapter
from tests.support.servers.traffic import APART, CLOSE, PROBE, check_purity, probe, run_traffic, straddling
from tests.support.servers.vllm import (
    SECRET,
    Model,
    Served,
    a_model,
    a_sender,
    a_server,
    distance,
    model_directory,
    parameters,
    publish_to_all,
)

pytestmark = pytest.mark.integration

LORA = LoraConfig(rank=4, alpha=16.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a base with weights, which takes adapters."""
    directory = model_directory(tmp_path_factory.mktemp("lora") / "base", tied=True)
    a_model(directory, 1).save_pretrained(directory)  # type: ignore[operator]
    with a_server(directory, "127.0.0.7", LORA) as ready:
        yield ready


def an_adapted(directory: Path, seed: int) -> Model:
    """The base with adapters that change it far more than rounding does."""
    model: Model = add_adapters(a_model(directory, 1), LORA)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if is_trained(name):
                tensor.copy_(0.2 * torch.randn_like(tensor))
    return model


def test_before_its_first_adapter_a_server_refuses_and_takes_one_afterwards(server: Served) -> None:
    with pytest.raises(RolloutError, match="does not exist"):
        probe(server, 0)
    model = an_adapted(server.model, 7)
    with a_sender([server], lora=LORA) as sender:
        publish_to_all(sender, 0, model)
        assert distance(model, PROBE, probe(server, 0)) < CLOSE


def test_after_an_update_the_server_serves_the_base_with_the_trainers_adapter(server: Served) -> None:
    first, second = (an_adapted(server.model, seed) for seed in (1, 2))
    with a_sender([server], lora=LORA) as sender:
        for version, (new, old) in enumerate([(first, second), (second, first), (first, second), (second, first)]):
            publish_to_all(sender, version, new)
            completion = probe(server, version)
            assert (completion.version_min, completion.version_max) == (version, version)
            assert distance(new, PROBE, completion) < CLOSE
            assert distance(old, PROBE, completion) > APART


def test_requests_in_flight_go_on_with_the_new_adapter(server: Served) -> None:
    first, second = (an_adapted(server.model, seed) for seed in (3, 4))
    traffic, models = run_traffic([server], first, second, lora=LORA)
    check_purity(traffic, models)
    assert straddling(traffic), "no request was in flight during an update"
    assert traffic.retries == 0


def test_an_adapter_that_the_server_has_no_layers_for_is_refused_and_the_next_trainer_is_served(server: Served) -> None:
    model = an_adapted(server.model, 5)
    strange = [(name.replace("layers.0", "layers.7"), tensor) for name, tensor in parameters(model)]
    refused = pytest.raises(WeightSyncError, match=r"no adapter at 6 layers, such as model\.layers\.7")
    with a_sender([server], lora=LORA, patience=0.5) as sender, refused:
        sender.publish(0, strange)
    with a_sender([server], lora=LORA) as sender:
        publish_to_all(sender, 1, model)
        assert distance(model, PROBE, probe(server, 1)) < CLOSE


def test_a_server_that_lost_its_adapter_gets_it_again_between_two_updates(server: Served) -> None:
    """What a restarted server looks like: alive, and without a version."""
    model = an_adapted(server.model, 6)
    told: list[int | None] = []
    with a_sender([server], lambda _, version: told.append(version), LORA) as sender:
        publish_to_all(sender, 3, model)
        with ServerAdminClient(server.endpoint, SECRET) as control:
            control.post("/collective_rpc", Deadline("an answer", 10), method="leave_weights")
        wait_for("the server to be back", lambda: told == [3, None, 3], 30, missing=lambda: str(told))
        assert distance(model, PROBE, probe(server, 3)) < CLOSE


def test_a_saved_adapter_is_what_vllm_loads_by_itself(server: Served, tmp_path: Path) -> None:
    model = an_adapted(server.model, 8)
    tensors = {name: tensor.detach() for name, tensor in parameters(model)}
    save_whole_adapter(tmp_path / "saved", tensors, ModelConfig(path=str(server.model), lora=LORA))
    ask(server, "/v1/load_lora_adapter", {"lora_name": "saved", "lora_path": str(tmp_path / "saved")})
    request = json.loads(GenerationRequest(PROBE, 1, 1.0, 24, []).body("salt"))
    (choice,) = json.loads(ask(server, ROUTE, request | {"model": "saved"}))["choices"]
    logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    tokens = tuple(choice["token_ids"])
    completion = Completion(tokens, logprobs, "length", 0, 0, server.endpoint, 0.0, (0,) * len(tokens))
    assert distance(model, PROBE, completion) < CLOSE
    assert distance(an_adapted(server.model, 9), PROBE, completion) > APART


def ask(server: Served, route: str, body: dict[str, Any]) -> bytes:
    """The server's answer to a POST, whatever its form."""
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    link = HTTPConnection(server.endpoint, timeout=60)
    link.request("POST", route, json.dumps(body), headers)
    response = link.getresponse()
    answer = response.read()
    link.close()
    assert response.status == 200, answer
    return answer
