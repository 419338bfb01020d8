"""What ranks do whose AdamW stores its moments in sixteen or eight bits."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from pipeline.checkpoints import TrainerState, newest_checkpoint, sharded_state
from pipeline.config.schema import MomentType
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.moment_storage import MOMENTS
from tests.support.ranks.worker_cases import OPTIM, assert_equal, parameters, spec_of, train, world

FLOAT8 = OPTIM.model_copy(update={"state_dtype": "float8"})
TYPES: dict[MomentType, set[torch.dtype]] = {
    "bfloat16": {torch.bfloat16},
    "float8": {torch.float8_e4m3fn, torch.float32},
}


def rounded_moments_survive_a_checkpoint(rank: int, path: Path, moment_type: MomentType, share: float) -> None:
    """`share`: how many of the bytes of float32 they take at most, in matrices of 16 columns."""
    rounded = OPTIM.model_copy(update={"state_dtype": moment_type})
    with world() as mesh:
        one, other = (ModelWorker(spec_of(path, optim=rounded), mesh) for _ in range(2))
        full = ModelWorker(spec_of(path), mesh)
        before = train(one, steps=2)
        other.load_state(deepcopy(one.state()))
        for worker in (one, other):
            assert worker.optimizer is not None
            assert {m.dtype for m in worker.optimizer.moments() if m.ndim} == TYPES[moment_type]
        assert train(one) == train(other)
        assert_equal(parameters(one), parameters(other))
        assert one.memory().optimizer <= share * full.memory().optimizer + 4 * len(one.optimizer.moments())
        assert train(full, steps=2) == pytest.approx(before, rel=0.02)
        assert train(full) != train(one), "rounded moments make another step"


def train_and_save(rank: int, path: Path) -> None:
    with world() as mesh:
        one = ModelWorker(spec_of(path, optim=FLOAT8), mesh)
        train(one, steps=3)
        state = TrainerState(job="rl", step=3, models=("policy",))
        sharded_state.save(str(path / "checkpoints"), "1-0", state, {"policy": one.state()})
        _keep(rank, path / "saved.pt", one)


def load_and_compare(rank: int, path: Path) -> None:
    """What was saved is here bit for bit, and the next step is taken."""
    with world() as mesh:
        one = ModelWorker(spec_of(path, optim=FLOAT8), mesh)
        state = {"policy": one.state()}
        checkpoint = newest_checkpoint(str(path / "checkpoints"))
        assert checkpoint is not None
        sharded_state.load_shards(checkpoint, state)
        one.load_state(state["policy"])
        _keep(rank, path / f"loaded{rank}.pt", one)
        if rank == 0:
            saved, loaded = (torch.load(path / name) for name in ("saved.pt", "loaded0.pt"))
            assert saved.keys() == loaded.keys()
            assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert train(one, steps=1)


def _keep(rank: int, path: Path, worker: ModelWorker) -> None:
    """Write everything that the optimizer stores, whole. A collective operation."""
    assert worker.optimizer is not None
    whole: dict[str, Any] = {}
    for parameter, weight in worker.model.named_parameters():
        for name, tensor in worker.optimizer.adamw.state[weight].items():
            shard = tensor.to(torch.float32) if name in MOMENTS else tensor  # gloo gathers no float8
            whole[f"{parameter}.{name}"] = shard.full_tensor() if isinstance(shard, DTensor) else shard
    if rank == 0:
        torch.save(whole, path)
