"""A mixture of experts through the API: the SDK's own client trains adapters on its experts.

python -m pytest -m trial tests/integration/test_tinker_mixture.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.integration.tinker_client import adam, client_of, forget_clients, logprobs_of, make_data
from tests.integration.tinker_server import TinkerServer, serving
from tests.support.models.jobs import weights
from tests.support.models.tiny import write_tiny

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.filterwarnings("ignore")]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CLOSE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("mixture") / "model", seed=5, model_type="qwen3_moe", **EXPERTS)


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[TinkerServer]:
    with serving(base.parent / "run", base, ranks=2, checkpoint_steps=3) as started:
        yield started
    forget_clients()


def train(trainer: tinker.TrainingClient, steps: int) -> float:
    """The loss of the last of these steps, over the same data each time."""
    for _ in range(steps):
        passed, stepped = trainer.forward_backward(make_data(1), "cross_entropy"), trainer.optim_step(adam(1e-2))
        loss: float = passed.result().metrics["loss:sum"]
        stepped.result()
    return loss


def saved(server: TinkerServer, trainer: tinker.TrainingClient, name: str) -> Path:
    path = trainer.save_weights_for_sampler(name).result().path
    (version,) = (server.api / "weights" / path.removeprefix("tinker://").replace(":", "-")).iterdir()
    return version


@torch.no_grad()
def test_adapters_on_experts_learn_are_saved_as_peft_reads_them_and_go_on_from_a_state(
    server: TinkerServer, base: Path
) -> None:
    with client_of(server) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
        first, last = train(trainer, 1), train(trainer, 7)
        assert last < first - 2

        folder = saved(server, trainer, "trained")
        of_experts = {name: value for name, value in weights(folder).items() if ".experts." in name}
        assert len(of_experts) == 2 * 4 * 3 * 2  # layers, experts, matrices, A and B
        assert all(np.abs(value).max() > 0 for name, value in of_experts.items() if "lora_B" in name)

        network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged = PeftModel.from_pretrained(network, str(folder)).merge_and_unload()
        data = make_data(2)
        for found, datum in zip(logprobs_of(trainer.forward(data, "cross_entropy").result()), data, strict=True):
            whole = merged(input_ids=torch.tensor(datum.model_input.to_ints())[None]).logits[0].log_softmax(-1)
            targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].to_numpy())
            np.testing.assert_allclose(found, whole.gather(1, targets[:, None])[:, 0], atol=CLOSE)

        state = trainer.save_state("eight").result().path
        resumed = client.create_training_client_from_state_with_optimizer(state).result()
        for each in (trainer, resumed):
            train(each, 2)
        ends = [weights(saved(server, each, "end")) for each in (trainer, resumed)]
        assert ends[0].keys() == ends[1].keys()
        for name, value in ends[0].items():
            np.testing.assert_array_equal(value, ends[1][name], err_msg=name)
