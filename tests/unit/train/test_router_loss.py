"""The auxiliary loss of routers: transformers' own formula for one sequence, and sums over any micro-batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model.collate import collate
from pipeline.train.model.models import build_model
from pipeline.train.model.router_loss import METRIC, RouterLoss
from pipeline.train.model.routers import ROUTING, routers
from tests.support.models.tiny import write_tiny

EXPERTS, TAKEN, COEFFICIENT = 8, 2, 0.5
MIXTURE = {"num_experts": EXPERTS, "num_experts_per_tok": TAKEN, "moe_intermediate_size": 16, "initializer_range": 0.5}
ROWS = [np.arange(9) % 17, np.array([0, 1, 2, 3, 9, 9]), np.array([5, 5, 5]), np.arange(12) % 5]
"""Tokens of rows; the second begins as the first."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_tiny(tmp_path_factory.mktemp("model"), 5, model_type="qwen3_moe", **MIXTURE)
    return build_model(ModelConfig(path=str(path), init="pretrained"), 0)


def test_the_loss_of_one_sequence_is_transformers_own_mean_over_layers(model: Any) -> None:
    loss = RouterLoss(model)
    loss.use(COEFFICIENT)
    own, sums, records = _pass(model, loss, _batch(ROWS[:1]), "packed")
    wanted = [load_balancing_loss_func((record.logits_TX,), EXPERTS, TAKEN) for record in records]
    mean = torch.stack(wanted).mean()
    torch.testing.assert_close(own, COEFFICIENT * mean)
    torch.testing.assert_close(sums[METRIC], mean.detach())


@pytest.mark.parametrize("how", ["packed", "shared", "padded"])
def test_loss_and_gradient_do_not_depend_on_packing_or_on_the_cut(model: Any, how: Packing) -> None:
    loss, batch = RouterLoss(model), _batch(ROWS)
    loss.use(COEFFICIENT)
    whole = sum(_slopes(model, loss, batch.take([index]), "packed") for index in range(len(ROWS)))
    parts = sum(_slopes(model, loss, batch.take(part), how) for part in ([0, 1, 3], [2]))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)


def test_a_batch_without_rows_and_a_row_without_counted_tokens_have_no_loss(model: Any) -> None:
    loss = RouterLoss(model)
    loss.use(COEFFICIENT)
    uncounted = Batch.of([TrainSequence(np.arange(4).astype(np.int32), np.zeros(4, np.uint8))])
    for batch in (uncounted, uncounted.take([])):
        own, sums, _ = _pass(model, loss, batch, "packed")
        assert own.item() == sums[METRIC].item() == 0
        own.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()


def test_without_a_coefficient_routers_keep_nothing(model: Any) -> None:
    loss = RouterLoss(model)
    loss.use(0.0)
    micro = collate(_batch(ROWS), "packed", torch.device("cpu"))
    _forward(model, micro)
    assert loss.take(micro) == (0.0, {})
    assert not any(ROUTING in module.__dict__ for module in routers(model) if module)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = build_model(ModelConfig(path=str(write_tiny(tmp_path, 5)), init="pretrained"), 0)
    RouterLoss(dense).use(0.0)
    with pytest.raises(ConfigError, match=r"optim\.router_aux_loss_coef=0\.1: expected 0 for a model without"):
        RouterLoss(dense).use(0.1)


def _batch(rows: list[Any]) -> Batch:
    return Batch.of([TrainSequence(row.astype(np.int32), (np.arange(len(row)) > 1).astype(np.uint8)) for row in rows])


def _forward(model: Any, micro: Any) -> None:
    model(micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M, micro.targets_M, 1.0, False)


def _pass(model: Any, loss: RouterLoss, batch: Batch, how: Packing) -> tuple[Any, dict[str, Tensor], list[Any]]:
    micro = collate(batch, how, torch.device("cpu"))
    _forward(model, micro)
    records = [module.__dict__[ROUTING] for module in routers(model) if module]
    own, sums = loss.take(micro)
    return own, sums, records


def _slopes(model: Any, loss: RouterLoss, batch: Batch, how: Packing) -> Tensor:
    """The loss, and its gradient for all parameters, in one vector."""
    own, sums, _ = _pass(model, loss, batch, how)
    slopes = torch.autograd.grad(own, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([sums[METRIC].reshape(1), *(slope.flatten() for slope in slopes)])
