"""What the scenarios of `dispatch_ranks` have in common."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config import LossConfig, OptimConfig
from pipeline.errors import TrainingError
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines
from tests.support.oracle.cases import make_batch, policy_spec

Scenario = Callable[[RankGroup, Path], None]
GRPO = LossConfig(name="grpo", clip_low=0.2, clip_high=0.3, old_logprobs="sampler", tis="none")
OPTIM = OptimConfig(lr=1e-2, warmup_steps=1)
PATIENCE = Deadlines(operation=30, control=4, grace=1)
BUDGET = Budget(96)


def fresh(dispatch: RankGroup, path: Path, seed: int = 0) -> Batch:
    dispatch.init_model("policy", policy_spec(path, optim=OPTIM, seed=seed, steps=10))
    return make_batch("grpo")


def parameters(dispatch: RankGroup, name: str = "policy") -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in dispatch.full_parameters(name)}


def step(dispatch: RankGroup, batch: Batch) -> dict[str, float]:
    return dispatch.forward_backward("policy", batch, GRPO) | dispatch.optim_step("policy")


def refusal(call: Callable[[], object]) -> str:
    """The text of the `TrainingError` that the call must raise."""
    with pytest.raises(TrainingError) as refused:
        call()
    return str(refused.value)
