"""Workers of a tiny model on real ranks, for tests: their world, what they train on, and how they are compared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config import LoraConfig, LossConfig, ModelConfig, OptimConfig
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.loss_specs import SFT, LossSpec
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.worker_spec import ModelKind, ModelSpec
from tests.support.models.tiny import write_tiny

OPTIM = OptimConfig(lr=1e-2, clip_norm=0.5, weight_decay=0.1)
WORDS = 23
ENTROPY = LossConfig(name="grpo", old_logprobs="sampler", tis="none")


def write_config(path: Path, **changed: Any) -> Path:
    """A model directory without weights."""
    own = {"vocab_size": WORDS, "head_dim": 32, "initializer_range": 0.2, "tie_word_embeddings": False}
    return write_tiny(path, **{**own, **changed})


@contextmanager
def world(shards: int | None = None) -> Iterator[DeviceMesh]:
    """The mesh over which this rank's models are sharded: over all ranks, or groups of `shards` of them."""
    dist.init_process_group("gloo")
    try:
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // (shards or ranks), shards or ranks), mesh_dim_names=("copy", "shard"))
        yield mesh["shard"]
    finally:
        dist.destroy_process_group()


def spec_of(
    path: Path, kind: ModelKind = "policy", *, lora: int = 0, dtype: str = "float32", **changed: Any
) -> ModelSpec:
    config = ModelConfig(path=str(path), init="random", dtype=dtype, lora=LoraConfig(rank=lora))  # type: ignore[arg-type]
    return ModelSpec(kind, config, **{"optim": OPTIM, "steps": 4, **changed})


def batch_of(*lengths: int, seed: int = 0) -> Batch:
    draw = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        tokens = draw.integers(0, WORDS, length).astype(np.int32)
        values, returns = draw.normal(size=(2, length)).astype(np.float32)
        rows.append(TrainSequence(tokens, mask, 1.0, values=values, returns=returns))
    return Batch.of(rows, "token")


MICRO_BATCHES = [batch_of(3, 9, 7), batch_of(12, 5, seed=1), Batch((), ())]


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls, self._function = 0, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._function(*args, **kwargs)


def train(rank: ModelWorker, steps: int = 2, objective: LossSpec = SFT) -> list[float]:
    """The losses and gradient norms of some steps."""
    seen = []
    for _ in range(steps):
        seen.append(rank.forward_backward(MICRO_BATCHES, True, objective)["loss"])
        seen.append(rank.optim_step().grad_norm)
    return seen


def parameters(rank: ModelWorker) -> dict[str, torch.Tensor]:
    return dict(rank.full_parameters())


def assert_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name], others[name]) for name in some)


def assert_rows(some: list[NDArray[np.float32]], others: list[NDArray[np.float32]]) -> None:
    assert all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))
