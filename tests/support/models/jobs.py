"""Jobs that the tests execute: a tiny model, packed rows, and files of jobs beside them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from pipeline.config import RunConfig
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, Device, RankState, joined_world
from pipeline.train.offline.packed_dataset import write_packed
from tests.fakes.configs import make_config
from tests.support.models.tiny import VOCABULARY, write_tiny

ROWS, PROMPTS, STEPS = 12, 4, 4


@contextmanager
def world_of_one(tokens: int = 64, device: Device = "cpu") -> Iterator[RankGroup]:
    """The dispatch of a world whose one process is this, with so many tokens for a micro-batch."""
    with site_of_one(device) as site:
        yield RankGroup(site, Budget(tokens))


@contextmanager
def site_of_one(device: Device = "cpu") -> Iterator[RankState]:
    """A world whose one process is this."""
    with pytest.MonkeyPatch.context() as patch:
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        for name, value in world.items():  # port 0: its store takes a free one, and nobody else has to find it
            patch.setenv(name, str(value))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with joined_world(device, Deadlines(operation=60, control=60, grace=1)) as site:
            yield site
        _clear_sharding_prop_cache()  # DTensor would lay tensors of the next world out on meshes of this one
        torch.set_num_threads(threads)


def write_model(path: Path) -> None:
    """The model from which jobs start, with weights."""
    write_tiny(path, seed=5)


def config_of(model: Path, lora: int = 0, **training: Any) -> RunConfig:
    return make_config(
        model={"path": str(model), "max_length": 16, "lora": {"rank": lora}},
        training={"steps": 1, "prompts_per_step": 1, "micro_batch_tokens": 64, "checkpoint_every": 2, **training},
    )


def make_rows(seed: int = 3) -> list[TrainSequence]:
    """Ragged rows, three for each prompt, with advantages and the log-probabilities of another policy."""
    draw, rows = np.random.default_rng(seed), []
    for index in range(ROWS):
        length = int(draw.integers(4, 12))
        mask = np.ones(length, np.uint8)
        mask[:2] = 0
        sampler_logprobs = (draw.normal(size=length) * 0.1 - 2.8).astype(np.float32)
        tokens = draw.integers(0, VOCABULARY, length).astype(np.int32)
        rows.append(TrainSequence(tokens, mask, float(draw.normal()), sampler_logprobs, prompt=index % PROMPTS))
    return rows


def write_job(
    folder: Path, kind: str, name: str = "", rows: list[TrainSequence] | None = None, /, **changed: Any
) -> Path:
    """`<folder>/<name>.json` (the name of its kind by default) with everything it names beside it, its rows packed."""
    name = name or kind
    data = folder / f"{name}-data"
    write_packed(data, make_rows() if rows is None else rows, VOCABULARY)
    portion = {"batch": 5} if kind == "sft" else {"prompts": 3}
    tree = {
        "kind": kind,
        "version": 1,
        "inputs": {"kind": "packed", "folder": data.name},
        "optimizer_state": f"{kind}-state",
        "output": f"{name}-model",
        "log": f"{name}.jsonl",
        "schedule": {"steps": STEPS, **portion, "optim": {"lr": 1e-3}},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tree | changed))
    return path


def events(log: Path) -> list[str]:
    """The events of a job's log, in order."""
    return [json.loads(line)["event"] for line in log.read_text().splitlines()]


def weights(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_same(one: Path, other: Path, tolerance: float = 0.0) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        np.testing.assert_allclose(tensor, theirs[name], rtol=0, atol=tolerance, err_msg=name)
