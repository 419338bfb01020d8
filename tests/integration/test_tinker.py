"""The SDK's own client against a server of ours; what it computes against float64."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.integration.tinker_client import (
    POLICY_LOSSES,
    adam,
    client_of,
    datum,
    flood_of_a_dead_client,
    forget_clients,
    logprobs_of,
    make_data,
    requests_done,
    usage,
)
from tests.integration.tinker_server import TinkerServer, serving
from tests.integration.tinker_truth import Truth
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import VOCABULARY, weights, write_model
from tests.support.runs.launched import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
LOSSES = ("cross_entropy", *POLICY_LOSSES)
CONFIGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "cispo": {"clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25},
}
CLOSE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tinker") / "model"
    write_model(path)
    return path


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[TinkerServer]:
    """Two ranks, so that rows are cut and gradients cross."""
    with serving(base.parent / "run", base, ranks=2, checkpoint_steps=3) as started:
        yield started
    forget_clients()


@pytest.fixture
def client(server: TinkerServer) -> Iterator[tinker.ServiceClient]:
    with client_of(server) as opened:
        yield opened


def raw_post(server: TinkerServer, route: str, body: bytes, key: str = "") -> tuple[int, bytes]:
    """Status and body of the answer to a request that no SDK made."""
    parts = urlsplit(server.url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_SECONDS)) as link:
        link.request("POST", f"/api/v1/{route}", body, {"X-API-Key": key or server.key})
        answer = link.getresponse()
        return answer.status, answer.read()


def new_model(client: tinker.ServiceClient, rank: int = 4, **options: Any) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=rank, **options).result()


def exported(server: TinkerServer, trainer: tinker.TrainingClient, name: str) -> Path:
    """The folder of the adapter as it is now."""
    path = trainer.save_weights_for_sampler(name).result().path
    folder = server.api / "weights" / path.removeprefix("tinker://").replace(":", "-")
    (version,) = folder.iterdir()
    return version


def test_losses_of_all_kinds_add_up_and_steps_have_their_own_settings(
    server: TinkerServer, client: tinker.ServiceClient, base: Path
) -> None:
    trainer = new_model(client, seed=7)
    truth = Truth(base, exported(server, trainer, "fresh"))
    steps = [adam(), adam(3e-3, beta1=0.5, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)]
    for number, params in enumerate(steps):
        asked = []
        for index, loss in enumerate(LOSSES):
            data, config = make_data(10 * number + index, loss), CONFIGS.get(loss)
            asked.append((trainer.forward_backward(data, loss, config), data, loss, config or {}))
        stepped = trainer.optim_step(params)
        for future, data, loss, config in asked:
            expected = truth.loss(data, loss, config)
            expected.backward()
            output = future.result()
            assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=CLOSE), loss
            for found, each in zip(logprobs_of(output), data, strict=True):
                np.testing.assert_allclose(found, truth.logprobs(each).detach(), atol=CLOSE)
        stepped.result()
        truth.step(params)
    assert truth.distance(weights(exported(server, trainer, "stepped"))) < CLOSE


def test_a_forward_pass_leaves_nothing_behind(client: tinker.ServiceClient) -> None:
    trainer, data = new_model(client), make_data(1)
    passed, stepped = trainer.forward(data, "cross_entropy"), trainer.optim_step(adam())
    assert passed.result().metrics["loss:sum"]
    with pytest.raises(tinker.RequestFailedError, match="forward_backward comes first"):
        stepped.result()


def test_several_targets_at_a_position_dense_or_sparse(
    server: TinkerServer, client: tinker.ServiceClient, base: Path
) -> None:
    trainer = new_model(client)
    truth = Truth(base, exported(server, trainer, "fresh"))
    draw = np.random.default_rng(0)
    targets = draw.integers(1, VOCABULARY, (5, 3))
    share = draw.random((5, 3)).astype(np.float32)
    targets[1:], share[1:] = 0, 0.0
    dense = datum(range(5), {"target_tokens": targets, "weights": share})
    sparse = types.Datum(
        model_input=dense.model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch_sparse(torch.tensor(targets)),
            "weights": types.TensorData.from_torch_sparse(torch.tensor(share)),
        },
    )
    expected = truth.loss([dense], "cross_entropy", {}).item()
    whole = trainer.forward([dense], "cross_entropy").result()
    some = trainer.forward([sparse, dense], "cross_entropy").result()
    assert whole.metrics["loss:sum"] == pytest.approx(expected, rel=CLOSE)
    assert some.metrics["loss:sum"] == pytest.approx(2 * expected, rel=CLOSE)
    logprobs = truth.logprobs(dense).detach().numpy()
    np.testing.assert_allclose(logprobs_of(whole)[0], logprobs, atol=CLOSE)
    np.testing.assert_allclose(logprobs_of(some)[0], np.where(targets > 0, logprobs, 0.0), atol=CLOSE)


def test_a_loss_of_the_clients_own_is_what_autograd_makes_of_it(
    server: TinkerServer, client: tinker.ServiceClient, base: Path
) -> None:
    trainer, data = new_model(client, seed=1), make_data(5)

    def squares(given: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([each.square().sum() for each in logprobs]).sum(), {"mine:sum": 1.0}

    truth = Truth(base, exported(server, trainer, "fresh"))
    future, stepped = trainer.forward_backward_custom(data, squares), trainer.optim_step(adam())
    expected = torch.stack([truth.logprobs(each).square().sum() for each in data]).sum()
    expected.backward()
    truth.step(adam())
    assert future.result().metrics["loss:sum"] == pytest.approx(expected.item(), rel=CLOSE)
    stepped.result()
    assert truth.distance(weights(exported(server, trainer, "stepped"))) < CLOSE


def test_data_in_many_chunks_is_what_it_is_in_one(server: TinkerServer) -> None:
    data, results, adapters = make_data(3, count=16), [], []
    for longest in (1024, 2):
        with client_of(server) as client:
            flags = client.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": longest})
            client.holder._client_config = flags
            trainer = new_model(client, seed=2)
            passed, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(adam())
            results.append(passed.result())
            stepped.result()
            adapters.append(weights(exported(server, trainer, "stepped")))
    assert results[0].metrics["loss:sum"] == pytest.approx(results[1].metrics["loss:sum"], rel=CLOSE)
    for one, other in zip(logprobs_of(results[0]), logprobs_of(results[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=CLOSE)
    for name, tensor in adapters[0].items():
        np.testing.assert_allclose(tensor, adapters[1][name], atol=1e-4, err_msg=name)


def test_clients_and_models_at_once_are_to_the_bit_what_each_is_alone(server: TinkerServer) -> None:
    forms = ((4, 1), (4, 2), (8, 1))

    def train(trainer: tinker.TrainingClient, number: int) -> list[Any]:
        futures: list[Any] = []
        for step in range(3):
            futures.append(trainer.forward_backward(make_data(100 * number + step), "cross_entropy"))
            futures.append(trainer.optim_step(adam()))
        return futures

    alone, together = [], []
    for number, (rank, seed) in enumerate(forms):
        with client_of(server) as client:
            trainer = new_model(client, rank, seed=seed)
            [each.result() for each in train(trainer, number)]
            alone.append(weights(exported(server, trainer, "end")))
    with client_of(server) as one, client_of(server) as other:
        trainers = [
            new_model(client, rank, seed=seed) for client, (rank, seed) in zip((one, other, one), forms, strict=True)
        ]
        futures = [train(trainer, number) for number, trainer in enumerate(trainers)]
        [each.result() for some in futures for each in some]
        together = [weights(exported(server, trainer, "end")) for trainer in trainers]
    for mine, theirs in zip(alone, together, strict=True):
        for name, tensor in mine.items():
            np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)


def test_state_is_gone_on_from_with_and_without_the_optimizer(server: TinkerServer) -> None:
    with client_of(server) as client:
        trainer = new_model(client, seed=3)
        for step in range(3):
            trainer.forward_backward(make_data(step), "cross_entropy").result()
            trainer.optim_step(adam()).result()
        path = trainer.save_state("three", ttl_seconds=3600).result().path
        trainer.forward_backward(make_data(9), "cross_entropy").result()
        trainer.optim_step(adam()).result()
        expected = weights(exported(server, trainer, "four"))
    adapters = []
    with client_of(server) as client:
        for resume in (
            client.create_training_client_from_state_with_optimizer,
            client.create_training_client_from_state,
        ):
            resumed = resume(path).result()
            assert resumed.get_info().lora_rank == 4
            resumed.forward_backward(make_data(9), "cross_entropy").result()
            resumed.optim_step(adam()).result()
            adapters.append(weights(exported(server, resumed, "four")))
    assert all(np.array_equal(expected[name], adapters[0][name]) for name in expected)
    assert not all(np.array_equal(expected[name], adapters[1][name]) for name in expected)


def test_checkpoints_are_listed_replaced_and_removed(client: tinker.ServiceClient) -> None:
    trainer, rest = new_model(client), client.create_rest_client()
    path = trainer.save_state("one").result().path
    assert path == f"tinker://{trainer.model_id}/weights/one"
    with pytest.raises(tinker.RequestFailedError, match="there already"):
        trainer.save_state("one").result()
    assert trainer.save_state("one", overwrite=True, ttl_seconds=7200).result().path == path
    (listed,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert (listed.checkpoint_id, listed.checkpoint_type, listed.tinker_path) == ("weights/one", "training", path)
    assert listed.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    (listed,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert listed.expires_at is None
    rest.delete_checkpoint(trainer.model_id, "weights/one").result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_training_client_from_state(path).result()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (datum([1, 2], {"target_tokens": [2, 3], "weights": np.array([1, np.nan], np.float32)}), "not finite"),
        (datum([1, 99], {"target_tokens": [2, 3], "weights": np.ones(2, np.float32)}), "expected 0 … 16"),
        (datum([1] * 17, {"target_tokens": [2] * 17, "weights": np.ones(17, np.float32)}), "at most 16"),
        (datum([1, 2], {"target_tokens": [2, 3], "mask": np.ones(2, np.float32)}), "'mask'"),
    ],
)
def test_a_bad_datum_fails_its_request_alone(client: tinker.ServiceClient, bad: types.Datum, says: str) -> None:
    trainer = new_model(client)
    futures = [trainer.forward_backward(data, "cross_entropy") for data in ([bad], make_data(0))]
    stepped = trainer.optim_step(adam())
    with pytest.raises(tinker.RequestFailedError, match=says):
        futures[0].result()
    assert futures[1].result().metrics["loss:sum"]
    assert stepped.result().metrics


def test_what_is_not_there_is_the_sdks_own_error_with_one_message(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    with pytest.raises(tinker.BadRequestError, match="served here: tiny"):
        client.create_lora_training_client(base_model="other", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match=r"expected 1 to 64 \(serve.max_rank\)"):
        new_model(client, rank=1000)
    with pytest.raises(tinker.BadRequestError, match="expected tinker://"):
        client.create_training_client_from_state("tinker://../../weights/x").result()
    status, body = raw_post(server, "create_session", b"{}", key="tml-nobody")
    assert status == 401
    assert b"no such API key" in body


def test_a_session_survives_killed_trainers_and_a_killed_gateway_to_the_bit(server: TinkerServer) -> None:
    def session(disturb: Callable[[int], None]) -> tuple[list[float], dict[str, Any]]:
        with client_of(server) as client:
            trainer, losses = new_model(client, seed=5), []
            for step in range(8):
                halves = [trainer.forward_backward(make_data(10 * step + n), "cross_entropy") for n in (0, 1)]
                stepped = trainer.optim_step(adam())
                disturb(step)
                losses += [half.result().metrics["loss:sum"] for half in halves]
                stepped.result()
            return losses, weights(exported(server, trainer, "end"))

    def kill(step: int) -> None:
        if step == 3:
            server.kill_trainer()
            server.kill_gateway()
            server.start_gateway()
            server.start_trainer()

    losses, expected = session(lambda step: None)
    found, adapter = session(kill)
    assert found == losses
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensor, adapter[name], err_msg=name)


def test_the_launcher_prints_what_each_key_used(server: TinkerServer, client: tinker.ServiceClient) -> None:
    new_model(client).forward_backward(make_data(1), "cross_entropy").result()
    run = ["--usage", "experiment=tinker", f"output={server.root.parent}", f"name={server.root.name}"]
    command = [sys.executable, str(ROOT / "launchers" / "serve.py"), *run]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_SECONDS).stdout
    names, *rows = (re.split(r"  +", line.strip()) for line in printed.splitlines())
    (row,) = (dict(zip(names, row, strict=True)) for row in rows)
    used = usage(server)
    assert row["name"] == used["name"]
    columns = {"requests": "requests", "trained": "trained_tokens", "trainer s": "trainer_seconds"}
    expected = {name: f"{used['total'][field]:,.0f}" for name, field in columns.items()}
    assert {name: row[name] for name in columns} == expected
    assert used["total"]["trained_tokens"] > 0


def test_many_passes_of_a_killed_client_hold_up_nobody_also_after_a_restart(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    trainer, flood = new_model(client), 150
    before = requests_done(server)
    flood_of_a_dead_client(server, "forward_backward", flood)
    for restart in (False, True):
        if restart:
            server.kill_gateway()
            server.start_gateway()
        done = requests_done(server)
        assert trainer.forward_backward(make_data(1), "cross_entropy").result().metrics
        assert requests_done(server) - done <= 5, "its own, and what the trainer had in hand"
        assert requests_done(server) - before < flood, "the flood still waits: the pass went ahead of it"
