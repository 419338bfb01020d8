"""What jobs that stand alone refuse, and that nothing is lost by it."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import RunConfig
from pipeline.errors import CheckpointError, ConfigError, TrainingError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.model.optimizer import Optimizer
from pipeline.train.offline.job_execution import run_job_file
from pipeline.utils import shared_files
from tests.support.models.jobs import config_of, events, make_rows, write_job

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (0, r"checkpoint .*gone has no config\.json, \*\.safetensors: expected a model"),
        (2, r"checkpoint .*gone has no adapter_config\.json, adapter_model\.safetensors: expected an adapter"),
    ],
)
def test_a_missing_checkpoint_or_adapter_fails_and_leaves_nothing_half_done(
    lora: int, said: str, dispatch: RankGroup, model: Path, tmp_path: Path
) -> None:
    file = write_job(tmp_path, "rl", checkpoint="gone")
    with pytest.raises(CheckpointError, match=said):
        run_job_file(file, dispatch, config_of(model, lora=lora))
    assert {path.name for path in tmp_path.iterdir()} == {"rl.json", "rl-data", "rl.jsonl", "rl-state"}
    assert not list((tmp_path / "rl-state").glob("rl-*"))
    assert events(tmp_path / "rl.jsonl") == ["started", "failed"]


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_job_that_took_no_optimizer_step_leaves_no_model_and_keeps_its_data(
    kind: str, dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizer, "_global_norm", lambda *_: torch.tensor(math.inf, dtype=torch.float64))
    file = write_job(tmp_path, kind)
    for _ in range(2):  # what it committed does not make it done
        with pytest.raises(TrainingError, match="no optimizer step was taken"):
            run_job_file(file, dispatch, config)
        assert (tmp_path / f"{kind}-data" / "manifest.json").exists()
        assert not (tmp_path / f"{kind}-model").exists()


def truncate(folder: Path) -> None:
    with (folder / "sampler_logprobs.bin").open("r+b") as file:
        file.truncate(8)


def spoil(folder: Path) -> None:
    """NaN in an advantage, by a program that writes its own folders: with the right hash."""
    numbers = np.fromfile(folder / "advantages.bin", "<f4")
    numbers[7] = np.nan
    numbers.tofile(folder / "advantages.bin")
    manifest = shared_files.read_document(folder / "manifest.json", dict[str, Any])
    assert manifest is not None
    manifest["arrays"]["advantages"]["sha256"] = hashlib.sha256(numbers.tobytes()).hexdigest()
    shared_files.write_document(folder / "manifest.json", manifest)


def claim_another_vocabulary(folder: Path) -> None:
    manifest = shared_files.read_document(folder / "manifest.json", dict[str, Any])
    shared_files.write_document(folder / "manifest.json", {**(manifest or {}), "vocabulary": 151936})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, r"sampler_logprobs\.bin has 8 bytes, its manifest \d+: it is truncated or torn"),
        (spoil, "row 7: advantages holds a value that is not finite"),
        (claim_another_vocabulary, "was packed for a vocabulary of 151936; the model has 17"),
        (lambda folder: (folder / "manifest.json").unlink(), "holds no packed rows"),
    ],
    ids=["truncated", "not finite", "another vocabulary", "no manifest"],
)
def test_bad_input_is_named_and_nothing_is_lost(
    damage: Callable[[Path], None], said: str, dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    file = write_job(tmp_path, "rl")
    damage(tmp_path / "rl-data")
    before = {path.name for path in (tmp_path / "rl-data").iterdir()}
    with pytest.raises(TrainingError, match=said):
        run_job_file(file, dispatch, config)
    assert {path.name for path in (tmp_path / "rl-data").iterdir()} == before
    assert not (tmp_path / "rl-model").exists()
    assert events(tmp_path / "rl.jsonl") == ["started", "failed"]


def test_a_sample_longer_than_the_budget_is_named(dispatch: RankGroup, model: Path, tmp_path: Path) -> None:
    config = config_of(model, micro_batch_tokens=8)
    with pytest.raises(TrainingError, match=r"row \d+ has \d+ tokens; the longest that can be trained has 8"):
        run_job_file(write_job(tmp_path, "sft"), dispatch, config)
    assert (tmp_path / "sft-data" / "manifest.json").exists()


def test_rl_without_what_the_sampling_policy_said_is_refused(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    rows = [replace(row, sampler_logprobs=None) for row in make_rows()]
    with pytest.raises(TrainingError, match="rl-data: row 0 has no sampler_logprobs, which a policy loss needs"):
        run_job_file(write_job(tmp_path, "rl", "rl", rows), dispatch, config)
    assert (tmp_path / "rl-data").exists()


@pytest.mark.parametrize("name", ["optimizer_state", "output", "log"])
def test_a_job_that_stands_alone_says_where_everything_goes(
    name: str, dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{name}='': expected a path"):
        run_job_file(write_job(tmp_path, "sft", **{name: ""}), dispatch, config)


def test_a_stream_belongs_to_a_run(dispatch: RankGroup, config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected packed, in a job from a file"):
        run_job_file(write_job(tmp_path, "rl", inputs={"kind": "stream"}), dispatch, config)
