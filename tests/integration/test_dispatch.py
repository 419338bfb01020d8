"""The dispatch layer over two real ranks; the scenarios are in `dispatch_ranks`."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import ModelConfig, OptimConfig
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, joined_world
from pipeline.train.worker_spec import ModelSpec
from tests.support.oracle.cases import write_model
from tests.support.ranks import dispatch_ranks, forked_ranks

pytestmark = pytest.mark.integration
DEATH = "a_rank_dies_in_an_operation"
"""Torchrun has a part in this one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dispatch") / "model"
    write_model(path, tied=True)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def outcomes(model: Path) -> dict[str, str | None]:
    """What became of each scenario, all in one world."""
    results = model.parent / "outcomes.json"
    forked_ranks.run_ranks(2, dispatch_ranks.work, model, results)
    return read(results)


def read(results: Path) -> dict[str, str | None]:
    outcomes: dict[str, str | None] = json.loads(results.read_text())
    return outcomes


@pytest.mark.parametrize("scenario", dispatch_ranks.SCENARIOS)
def test_scenario(scenario: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[scenario] is None, outcomes[scenario]


@pytest.mark.parametrize("breakage", sorted(dispatch_ranks.BREAKAGES.keys() - {DEATH}))
def test_breakage(breakage: str, model: Path, tmp_path: Path) -> None:
    results = tmp_path / "outcome.json"
    ranks = forked_ranks.start_ranks(2, dispatch_ranks.work, model, results, breakage)
    ranks[0].join(forked_ranks.JOIN_SECONDS)
    forked_ranks.end_ranks(ranks)
    assert read(results) == {breakage: None}


def test_torchrun_lets_the_controller_tell_of_a_rank_that_died(model: Path, tmp_path: Path) -> None:
    results = tmp_path / "outcome.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.support.ranks.dispatch_ranks", str(model), str(results), DEATH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert results.exists(), done.stderr[-4000:]
    assert read(results) == {DEATH: None}


HYBRID = {
    "model_type": "qwen3_5_text",
    "initializer_range": 0.3,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def answer_packed_and_alone(rank: int, path: Path) -> None:
    """Rows of a model with a recurrent layer, that a packed budget would lay end to end."""
    draw = np.random.default_rng(0)
    masks = [(np.arange(length) > 0).astype(np.uint8) for length in (9, 5, 12)]
    rows = [TrainSequence(draw.integers(0, 19, len(mask)).astype(np.int32), mask) for mask in masks]
    spec = ModelSpec("policy", ModelConfig(path=str(path), init="random"), OptimConfig(), steps=2)

    def algorithm(dispatch: RankGroup) -> None:
        dispatch.init_model("policy", spec)
        together = dispatch.forward("policy", Batch.of(rows))
        for row, answer in zip(rows, together, strict=True):
            np.testing.assert_allclose(answer, dispatch.forward("policy", Batch.of([row]))[0], rtol=0, atol=1e-5)

    run_controller_or_worker(algorithm, Budget(4096, packed=True))


def test_rows_that_would_see_each_other_packed_are_answered_as_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    forked_ranks.run_ranks(1, answer_packed_and_alone, tmp_path)


def abort_in_the_world(rank: int, errors: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    with joined_world("cpu", Deadlines()):
        os.abort()


def test_a_rank_that_native_code_aborts_says_where_it_was(tmp_path: Path) -> None:
    ranks = forked_ranks.start_ranks(1, abort_in_the_world, tmp_path / "errors")
    ranks[0].join(forked_ranks.JOIN_SECONDS)
    forked_ranks.end_ranks(ranks)
    said = (tmp_path / "errors").read_text()
    assert "Fatal Python error: Aborted" in said
    assert "in abort_in_the_world" in said
