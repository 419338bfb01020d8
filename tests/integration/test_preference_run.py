"""Preference training: it learns a rule, and goes on after an interruption with the same metrics and model. The real
controller, as each attempt's only rank."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
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
PAIRS, HELD_OUT, BATCH, EPOCHS = 90, 20, 8, 3
STEPS = 34  # 3 epochs of 90 pairs: the last step has six
STOPPED = 15  # within the second epoch, and between two evaluations
TINY = {"path": str(BUILT_IN / "tiny_qwen3"), "init": "random", "max_length": 64}


def write_pairs(path: Path, changed: int = -1) -> Path:
    rng = random.Random(3)
    with path.open("w") as file:
        for number in range(PAIRS + HELD_OUT):
            right = rng.randrange(10)
            wrong = (right + rng.randrange(1, 10)) % 10
            row = {"prompt": f"{right}+0=", "chosen": str(right), "rejected": str(wrong)}
            if number == changed:
                row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
            file.write(json.dumps(row) + "\n")
    return path


def config_of(data: Path, model: Mapping[str, Any] = TINY, **preference: Any) -> RunConfig:
    return make_config(
        model=dict(model),
        data={"path": str(data), "eval_rows": HELD_OUT},
        training={"steps": 0, "prompts_per_step": 1, "eval_every": 10, "checkpoint_every": 100},
        preference={"epochs": EPOCHS, "batch": BATCH, "lr": 2e-3, **preference},
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


def run(root: Path, config: RunConfig, *, name: str = "1-0", stop_after: int = 0, refused: bool = False) -> None:
    run_ranks(1, attempt, root, config.model_dump(mode="json"), name, stop_after, refused)


def numbers(root: Path, kind: str, name: str) -> dict[int, float]:
    rows = read_rows(RunPaths(root).metrics)
    return {row["step"]: row[name] for row in rows if row["kind"] == kind}


def equal(one: Path, other: Path) -> bool:
    mine, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[key], theirs[key]) for key in theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DPO that nobody interrupts."""
    root = tmp_path_factory.mktemp("whole")
    run(root / "run", config_of(write_pairs(root / "pairs.jsonl")))
    return root / "run"


def test_accuracy_and_margin_rise_on_pairs_that_were_never_trained(whole: Path) -> None:
    accuracy, margin = (numbers(whole, "eval", f"eval/{name}") for name in ("accuracy", "margin"))
    assert (accuracy[0], margin[0]) == (0, 0), "the policy is its own reference: no completion is preferred"
    assert accuracy[STEPS] > 0.9
    assert margin[STEPS] > 1
    loss = numbers(whole, "train", "loss")
    assert loss[1] == pytest.approx(np.log(2), abs=1e-6)
    assert loss[STEPS] < loss[1] / 2


def test_an_interrupted_run_goes_on_with_the_same_metrics_reference_and_model(whole: Path, tmp_path: Path) -> None:
    config = config_of(write_pairs(tmp_path / "pairs.jsonl"))
    run(tmp_path / "run", config, stop_after=STOPPED)
    assert list(numbers(tmp_path / "run", "train", "loss")) == list(range(1, STOPPED + 1))
    run(tmp_path / "run", config, name="1-1")
    for name in ("loss", "margin", "accuracy", "reward/chosen", "logprob/rejected", "grad_norm", "pairs"):
        assert numbers(tmp_path / "run", "train", name) == numbers(whole, "train", name), name
    assert list(numbers(whole, "train", "loss")) == list(range(1, STEPS + 1))
    assert numbers(whole, "train", "pairs")[STEPS] == 6
    for name in ("eval/loss", "eval/margin"):
        assert numbers(tmp_path / "run", "eval", name) == numbers(whole, "eval", name)
    assert equal(tmp_path / "run" / "model", whole / "model")
    assert equal(tmp_path / "run" / "best", whole / "best")


def test_a_run_whose_pairs_changed_is_refused(tmp_path: Path) -> None:
    config = config_of(write_pairs(tmp_path / "pairs.jsonl"))
    run(tmp_path / "run", config, stop_after=2)
    write_pairs(tmp_path / "pairs.jsonl", changed=7)
    run(tmp_path / "run", config, name="1-1", refused=True)


@pytest.mark.parametrize(
    ("loss", "settings"), [("ipo", {"beta": 0.1}), ("simpo", {"beta": 2.0, "margin": 0.5, "label_smoothing": 0.05})]
)
def test_the_other_losses_learn_too(loss: str, settings: dict[str, float], tmp_path: Path) -> None:
    run(tmp_path / "run", config_of(write_pairs(tmp_path / "pairs.jsonl"), loss=loss, **settings))
    assert numbers(tmp_path / "run", "eval", "eval/accuracy")[STEPS] > 0.9


def write_labels(path: Path) -> Path:
    """The completions of `write_pairs`, each in a row with its label."""
    rows = [json.loads(line) for line in write_pairs(path).read_text().splitlines()]
    with path.open("w") as file:
        for pair in rows:
            for name in ("chosen", "rejected"):
                row = {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
                file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("write", [write_pairs, write_labels])
def test_kto_learns_from_labels_and_from_pairs_and_resumes(write: Callable[[Path], Path], tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "rows.jsonl"), loss="kto", beta=0.3)
    run(tmp_path / "run", config, stop_after=STOPPED)
    run(tmp_path / "run", config, name="1-1")
    measured = {name: numbers(tmp_path / "run", "eval", f"eval/{name}") for name in ("accuracy", "margin", "loss")}
    last = max(measured["loss"])
    assert measured["loss"][0] == pytest.approx(0.5), "1 - σ(0)"
    assert measured["accuracy"][last] > 0.9
    assert measured["margin"][last] > 0.5
    divergence = numbers(tmp_path / "run", "train", "kl")
    assert list(divergence) == list(range(1, last + 1))
    assert all(value >= 0 for value in divergence.values())


def test_the_results_do_not_depend_on_the_micro_batches_that_a_pair_is_split_over(whole: Path, tmp_path: Path) -> None:
    config = config_of(write_pairs(tmp_path / "pairs.jsonl"))
    training = config.training.model_copy(update={"micro_batch_tokens": 64})
    run(tmp_path / "run", config.model_copy(update={"training": training}), stop_after=5)
    mine, theirs = (numbers(root, "train", "loss") for root in (tmp_path / "run", whole))
    assert list(mine.values()) == pytest.approx([theirs[step] for step in mine], rel=1e-3)


def test_adapters_are_trained_with_the_base_as_their_reference(whole: Path, tmp_path: Path) -> None:
    model = {"path": str(whole / "model"), "init": "pretrained", "max_length": 64, "lora": {"rank": 4}}
    run(tmp_path / "run", config_of(write_pairs(tmp_path / "pairs.jsonl"), model))
    margins = list(numbers(tmp_path / "run", "train", "margin").values())
    assert margins[0] == 0
    assert fmean(margins[-10:]) > 0.2


def test_a_reward_model_learns_resumes_and_is_a_sequence_classifier(tmp_path: Path) -> None:
    config = config_of(write_pairs(tmp_path / "pairs.jsonl"), loss="bradley_terry", epochs=8)
    run(tmp_path / "whole", config)
    run(tmp_path / "run", config, stop_after=STOPPED)
    run(tmp_path / "run", config, name="1-1")
    for name in ("loss", "margin", "accuracy"):
        assert numbers(tmp_path / "run", "train", name) == numbers(tmp_path / "whole", "train", name)
    measured = numbers(tmp_path / "run", "eval", "eval/margin")
    last = max(measured)
    assert numbers(tmp_path / "run", "eval", "eval/accuracy")[last] > 0.9
    assert equal(tmp_path / "run" / "model", tmp_path / "whole" / "model")
    assert margin_by_transformers(tmp_path / "run" / "model", tmp_path / "pairs.jsonl") == pytest.approx(
        measured[last], rel=1e-3
    )


def margin_by_transformers(model: Path, data: Path) -> float:
    """The mean margin of the held-out pairs by transformers' classifier, with the chat template of its directory."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier, report = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(model)

    def score(prompt: str, answer: str) -> float:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        with torch.no_grad():
            return float(classifier(torch.tensor([tokens])).logits.item())

    rows = [json.loads(line) for line in data.read_text().splitlines()[-HELD_OUT:]]
    return float(np.mean([score(row["prompt"], row["chosen"]) - score(row["prompt"], row["rejected"]) for row in rows]))
