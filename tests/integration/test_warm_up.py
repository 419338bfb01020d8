"""A warm-up on real ranks: nothing is compiled after it, and nothing else is left of it.

Layers are captured as for the real compiler, but run as captured: they compute the same bits as without.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from pipeline.config import RunConfig
from pipeline.train.batching.packing import Budget, Packing
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.policy_update import PolicyUpdate
from pipeline.train.model import attention_sinks, packed_attention
from pipeline.train.model.cpu_offload import local
from pipeline.train.worker_spec import models_of
from tests.fakes.configs import make_config
from tests.support.models.tiny import VOCABULARY, write_tiny
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration
LENGTHS = [(3, 9, 7, 5), (12, 2, 4, 10), (15,), (6, 6, 6, 6, 11, 8, 16, 16, 14)]
"""Of the rows of each step; in the third the second rank has none."""
LOSSES: dict[str, dict[str, Any]] = {
    "one model": {"name": "grpo"},
    "three models": {"name": "ppo", "advantage_estimator": "gae", "kl": 0.1, "old_logprobs": "recompute"},
}


def a_config(path: Path, ranks: int, loss: str, compiled: bool) -> RunConfig:
    return make_config(
        model={"path": str(path), "max_length": 16},
        loss=LOSSES[loss],
        optim={"lr": 1e-2},
        training={"steps": len(LENGTHS), "prompts_per_step": 1, "micro_batch_tokens": 48, "compile": compiled},
        rollout={"group_size": 16},
        resources={"trainer": {"processes": ranks}},
    )


def rows_of(step: int) -> list[TrainSequence]:
    draw = np.random.default_rng(step)
    rows = []
    for length in LENGTHS[step]:
        mask = (np.arange(length) > 0).astype(np.uint8)
        tokens = draw.integers(0, VOCABULARY, length).astype(np.int32)
        tokens[: length // 2] = np.arange(length // 2) + step  # as those of a prompt
        rows.append(TrainSequence(tokens, mask, float(draw.normal()), np.full(length, -2.8, np.float32)))
    return rows


def compiled_graphs(site: RankState) -> int:
    """On every rank."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def whole_state(site: RankState) -> list[Any]:
    """On every rank: parameters, gradients, moments, progress and random states."""
    workers = site.workers.values()
    leaves = [leaf for worker in workers for leaf in tree_leaves(worker.state())]
    leaves += [p.grad for worker in workers for p in worker.model.parameters()]
    leaves += [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]
    return [local(leaf.detach()).numpy().tobytes() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def trained(dispatch: RankGroup, config: RunConfig) -> list[Any]:
    """What all steps said, and what the ranks have at the end."""
    for name in list(dispatch.models):
        dispatch.remove_model(name)
    dispatch.init_model("policy", models_of(config, "rl", config.optim, config.training.steps)["policy"])
    update = PolicyUpdate(dispatch, config)
    update.begin(config.optim, config.training.steps, 0)
    before = dispatch.run_on_all_models(whole_state)
    update.warm_up(WarmUp(config, dispatch, dispatch.keepalive))
    assert dispatch.run_on_all_models(whole_state) == before
    graphs = dispatch.run_on_all_models(compiled_graphs)
    assert (min(graphs) > 0) == config.training.compile
    metrics = [update.run(rows_of(step), step) for step in range(len(LENGTHS))]
    assert dispatch.run_on_all_models(compiled_graphs) == graphs
    return [metrics, dispatch.run_on_all_models(whole_state)]


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    *longest: int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What `varlen_attn` computes, in a way that can be captured on CPUs: all are [P, H, D], or keys and values
    [R, H, D]."""
    assert window_size == (-1, 0)
    places, tokens = torch.arange(query.shape[0]), torch.arange(key.shape[0])
    of_place, of_token = (
        torch.searchsorted(bounds, each.to(bounds.dtype), right=True)
        for bounds, each in ((of_queries, places), (of_keys, tokens))
    )
    until = of_keys[of_place] - of_queries[of_place] + places
    mask = (of_place[:, None] == of_token) & (until[:, None] >= tokens)
    heads_first = (each.transpose(0, 1) for each in (query, key, value))
    return scaled_dot_product_attention(*heads_first, mask, scale=scale, enable_gqa=True).transpose(0, 1)


def train_both_ways(rank: int, path: Path, ranks: int, packing: Packing, loss: str) -> None:
    if packing == "shared":  # the rectangle does not read the tables of the shared line
        packed_attention._kernel_takes = lambda query: True  # type: ignore[assignment]
        attention_sinks.varlen_attn = kernel  # type: ignore[assignment]
    compile_ = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_(self, backend="eager")  # type: ignore[method-assign]

    def algorithm(dispatch: RankGroup) -> None:
        plain, warm = (trained(dispatch, a_config(path, ranks, loss, compiled)) for compiled in (False, True))
        assert warm == plain

    run_controller_or_worker(algorithm, Budget(48, packed=packing != "padded", shared=packing == "shared"))


@pytest.mark.parametrize(
    ("ranks", "packing", "loss"),
    [(1, "packed", "three models"), (2, "padded", "one model"), (2, "shared", "one model")],
)
def test_steps_after_a_warm_up_compile_nothing_and_compute_the_bits_that_they_would_without(
    tmp_path: Path, ranks: int, packing: Packing, loss: str
) -> None:
    write_tiny(tmp_path / "model", 0, num_hidden_layers=1)
    run_ranks(ranks, train_both_ways, tmp_path / "model", ranks, packing, loss)
