"""Fine-tuning on a dataset that is interrupted in the middle of an epoch: the real controller, as each attempt's only
rank."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.config import RunConfig, load_config
from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import CheckpointError
from pipeline.roles.role_context import RoleContext
from pipeline.roles.trainer_session import RunSession
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import RunPaths
from pipeline.train.controller.lead_or_serve import run_role_of_rank
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.train_jobs import Job
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration
ROWS, BATCH, EPOCHS, HELD_OUT, EVERY = 26, 4, 3, 4, 5
STEPS = 20  # 3 epochs of 26 rows: the last step has two
STOPPED = 9  # within the second epoch, and between two measures


def write_data(path: Path, changed: int = -1) -> Path:
    with path.open("w") as file:
        for number in range(ROWS + HELD_OUT):
            said = str(3 * number + (number == changed))
            messages = [{"role": "user", "content": f"3*{number}"}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def config_of(data: Path, **model: Any) -> RunConfig:
    start = {"epochs": EPOCHS, "batch": BATCH, "lr": 1e-3}
    return make_config(
        model={"path": str(BUILT_IN / "tiny_qwen3"), "init": "random", "max_length": 64, **model},
        data={"path": str(data), "eval_rows": HELD_OUT},
        optim={"schedule": "cosine", "warmup_steps": 3},
        training={
            "steps": 0,
            "prompts_per_step": 1,
            "eval_every": EVERY,
            "checkpoint_every": 100,
            "sft": start,
        },
        tracking={"trackers": ()},
        resources={"trainer": {"nodes": 1, "processes": 1}},
    )


def attempt(rank: int, root: Path, tree: Mapping[str, Any], name: str, stop_after: int, refused: bool = False) -> None:
    """One attempt of the trainer, which is told to end after `stop_after` steps; 0: it is not."""
    config = load_config(dict(tree))
    made = FakeRun(root, config).attempt(name)
    world = made.meet()
    context = RoleContext(made.paths, config, world, world.of_role("trainer")[0])

    class Stopped(RunSession):
        done = 0

        def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
            super().note(job, step, metrics)
            self.done = step

        def _pulse(self) -> None:
            super()._pulse()
            if stop_after and self.done == stop_after:
                raise Interrupted("draining by the test")

    def lead(dispatch: RankGroup) -> None:
        if not refused:
            Stopped(context, dispatch).run()
            return
        with pytest.raises(CheckpointError, match="its rows are not those that this run has trained so far"):
            Stopped(context, dispatch).run()

    run_role_of_rank(config, "", lead)


def numbers(run: Path, kind: str, name: str) -> dict[int, float]:
    rows = read_rows(RunPaths(run).metrics)
    return {row["step"]: row[name] for row in rows if row["kind"] == kind}


def equal(one: Path, other: Path) -> bool:
    mine, theirs = load_file(one), load_file(other)
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[key], theirs[key]) for key in theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts."""
    root = tmp_path_factory.mktemp("whole")
    data = write_data(root / "chat.jsonl")
    run_ranks(1, attempt, root / "run", config_of(data).model_dump(mode="json"), "1-0", 0)
    return root / "run"


def test_an_interrupted_run_goes_on_within_the_epoch_and_ends_with_the_same_model(whole: Path, tmp_path: Path) -> None:
    data, run = write_data(tmp_path / "chat.jsonl"), tmp_path / "run"
    tree = config_of(data).model_dump(mode="json")
    run_ranks(1, attempt, run, tree, "1-0", STOPPED)
    assert list(numbers(run, "train", "loss")) == list(range(1, STOPPED + 1))
    run_ranks(1, attempt, run, tree, "1-1", 0)
    for name in ("loss", "lr", "tokens/batch"):
        assert numbers(run, "train", name) == numbers(whole, "train", name)
    assert len(numbers(run, "train", "loss")) == STEPS
    assert numbers(run, "eval", "eval/loss") == numbers(whole, "eval", "eval/loss")
    assert list(numbers(run, "eval", "eval/loss")) == [0, 5, 10, 15, 20]
    assert equal(run / "model" / "model.safetensors", whole / "model" / "model.safetensors")
    assert equal(run / "best" / "model.safetensors", whole / "best" / "model.safetensors")


def test_the_best_model_is_kept_and_the_job_says_how_long_it_is(whole: Path) -> None:
    measured = numbers(whole, "eval", "eval/loss")
    assert min(measured.values()) < measured[0]
    best = min(measured, key=lambda step: measured[step])
    is_last = equal(whole / "best" / "model.safetensors", whole / "model" / "model.safetensors")
    assert is_last == (best == STEPS)
    assert set(numbers(whole, "train", "steps").values()) == {float(STEPS)}
    assert json.loads(RunPaths(whole).training_job("sft").read_text())["schedule"]["steps"] == STEPS


def test_a_run_whose_data_changed_is_refused(tmp_path: Path) -> None:
    data, run = write_data(tmp_path / "chat.jsonl"), tmp_path / "run"
    tree = config_of(data).model_dump(mode="json")
    run_ranks(1, attempt, run, tree, "1-0", 2)
    write_data(data, changed=7)
    run_ranks(1, attempt, run, tree, "1-1", 0, True)
    write_data(data)
    run_ranks(1, attempt, run, tree, "1-2", 4)
    assert list(numbers(run, "train", "loss")) == [1, 2, 3, 4]


def test_adapters_are_trained_on_data_too(whole: Path, tmp_path: Path) -> None:
    data, run = write_data(tmp_path / "chat.jsonl"), tmp_path / "run"
    config = config_of(data, path=str(whole / "model"), init="pretrained", lora={"rank": 4})
    run_ranks(1, attempt, run, config.model_dump(mode="json"), "1-0", 0)
    for name in ("model", "best"):
        if (run / name).exists():
            assert (run / name / "adapter_model.safetensors").exists()
    assert (run / "model" / "adapter_config.json").exists()
    assert len(numbers(run, "train", "loss")) == STEPS
