"""`pipeline.observability.findings`: what a run's numbers say should be changed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.config.run_identity import flatten
from pipeline.observability.findings import MIN_COUNTED_STEPS, MIN_STEPS, SKIPPED_STEPS, findings_of
from pipeline.run.metrics_log import MetricRecord
from tests.fakes.configs import make_config

ROOT = Path(__file__).resolve().parents[3]
TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 4}
ASYNCHRONOUS = {"training": TRAINING}
MASKED = {"training": TRAINING | {"mask_truncated": True}}
SFT_ALONE = {"training": TRAINING | {"steps": 0, "sft": {"steps": 20}}}
OVER_SAMPLER = ASYNCHRONOUS | {"loss": {"name": "grpo", "old_logprobs": "sampler", "tis": "none"}}
GSPO = ASYNCHRONOUS | {"loss": {"name": "gspo"}}
GPUS = ASYNCHRONOUS | {"resources": {"device": "cuda", "gpus_per_node": 2}}
SYNCHRONOUS = GPUS | {"training": TRAINING | {"max_lag": 0}}
ONE_GPU = ASYNCHRONOUS | {"resources": {"device": "cuda", "gpus_per_node": 1, "colocate": True}}
CALM = {
    "skipped": 0.0,
    "samples/truncated": 0.05,
    "reward/std": 0.4,
    "clip_fraction": 0.01,
    "groups/stale": 0.0,
    "idle/trainer": 0.1,
    "idle/servers": 0.1,
    "idle/actor": 0.1,
}
SMALL, LARGE = ({"idle/trainer": 0.6, "tokens/batch": 2e4, "flops": 6 * size * 2e4} for size in (135e6, 1.7e9))
"""Idle trainers with a model of this number of parameters."""
CASES: dict[str, tuple[dict[str, Any], dict[str, float | None], str]] = {
    "gradients": (ASYNCHRONOUS, {"skipped": 1.0}, "20 optimizer steps changed nothing"),
    "batches that overflowed at several scales": (
        ASYNCHRONOUS,
        {"skipped": 1.0, "overflows": 4.0},
        "20 optimizer steps changed nothing",
    ),
    "the critic's": (ASYNCHRONOUS, {"critic/skipped": 1.0}, "20 optimizer steps of the critic changed nothing"),
    "equal rewards": (
        ASYNCHRONOUS,
        {"reward/std": 0.0, "reward/mean": 0.0},
        "All samples of a step have one reward, 0",
    ),
    "cut": (ASYNCHRONOUS, {"samples/truncated": 0.06}, "6% of the samples are cut off"),
    "cut and masked": (MASKED, {"samples/truncated": 0.4}, "they are sampled, but not trained"),
    "clip": (OVER_SAMPLER, {"clip_fraction": 0.27}, "The clip holds 27% of the tokens"),
    "stale": (ASYNCHRONOUS, {"groups/stale": 1.0}, "For every 100 groups that were trained, 25 were wasted"),
    "synchronous": (SYNCHRONOUS, {"idle/trainer": 0.6}, "as one half always does with max_lag=0"),
    "held back": (GPUS, {"idle/trainer": 0.6, "idle/actor": 0.5}, "training.max_lag holds new ones back"),
    "servers": (GPUS, {"idle/trainer": 0.6, "idle/servers": 0.0}, "the servers are the slower half"),
    "trainer": (GPUS, {"idle/trainer": 0.0, "idle/servers": 0.4}, "the trainer is the slower half"),
    "a small model on a shared GPU": (ONE_GPU, SMALL, "a server is limited by its process"),
}
SILENT: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "nothing stands out": (ASYNCHRONOUS, {}),
    "ratios over the trainer's own policy": (ASYNCHRONOUS, {"clip_fraction": 0.3}),
    "a clip that holds whole samples": (GSPO, {"clip_fraction": 0.3}),
    "halves that share a GPU": (ONE_GPU, LARGE),
    "a small model that staleness holds back": (ONE_GPU, SMALL | {"idle/actor": 0.5}),
    "a small model with GPUs of its own": (GPUS, SMALL),
    "a loss scale that was halved": (ASYNCHRONOUS, {"skipped": 0.0, "overflows": 1.0}),
    "no GPUs": (ASYNCHRONOUS, {"idle/trainer": 0.6, "idle/servers": 0.0}),
}


HELD, WASTED, SERVERS = "max_lag holds new ones back", "were wasted", "the servers are the slower half"
MEASURED: dict[str, list[str]] = {
    "lag-0.6b-1": [HELD],
    "lag-0.6b-2": [HELD],
    "tails-0.6b-2xh200": [WASTED, HELD],
    "loop-0.6b-2xh200": [SERVERS],
    "loop-1.7b-2xh200": [],
    "loop-4b-4xh200": [],
}
"""Runs on GPUs, and what limited each, as docs/performance.md found."""


def steps(count: int, **numbers: float) -> list[MetricRecord]:
    return [{"kind": "train", "job": "rl", "step": step, "time": 0.0} | CALM | numbers for step in range(1, count + 1)]


def of(given: dict[str, Any]) -> RunConfig:
    return make_config(**given)


@pytest.mark.parametrize(("given", "numbers", "seen"), CASES.values(), ids=CASES)
def test_a_number_that_stands_out_is_told_with_keys_that_exist(
    given: dict[str, Any], numbers: dict[str, float], seen: str
) -> None:
    config = of(given)
    (found,) = findings_of(config, steps(SKIPPED_STEPS + MIN_COUNTED_STEPS, **numbers))
    assert seen in found.observation
    keys = flatten(config.model_dump(mode="json"))
    named = re.findall(r"[a-z]+(?:\.[a-z_]+)+", found.change)
    assert named
    assert all(any(f"{key}.".startswith(f"{name}.") for key in keys) for name in named), named


def test_a_half_that_is_too_small_is_told_the_split_that_would_be_fastest() -> None:
    resources = {"device": "cuda", "trainer": {"processes": 2, "gpus": 1}, "inference": {"servers": 6, "gpus": 1}}
    (found,) = findings_of(
        of(ASYNCHRONOUS | {"resources": resources}),
        steps(SKIPPED_STEPS + MIN_COUNTED_STEPS, **{"idle/trainer": 0.0, "idle/servers": 2 / 3}),
    )
    # 2 GPUs of work for the trainer, 6 × 1/3 for the servers: half of 8 each takes 2/4 of the time.
    assert "Train on 4 GPUs and serve on 4: a step would take 1/2.0 of the time" in found.change
    assert "resources.trainer.processes=4 resources.inference.servers=4" in found.change


@pytest.mark.parametrize(("run", "limits"), MEASURED.items())
def test_runs_that_were_measured_are_told_what_limited_them(run: str, limits: list[str]) -> None:
    measured = json.loads((ROOT / "docs" / "performance" / f"{run}.json").read_text())
    training = TRAINING | {"max_lag": measured["command"]["lag"], "prompts_per_step": 16}
    rows = measured["rows"] * 2  # some were short
    found = [
        each.observation
        for each in findings_of(of(GPUS | {"training": training}), rows)
        if "cut off" not in each.observation
    ]
    assert all(limit in seen for limit, seen in zip(limits, found, strict=True)), found


@pytest.mark.parametrize(("given", "numbers"), SILENT.values(), ids=SILENT)
def test_nothing_is_told_without_need(given: dict[str, Any], numbers: dict[str, float]) -> None:
    assert findings_of(of(given), steps(SKIPPED_STEPS + MIN_COUNTED_STEPS, **numbers)) == []


def test_a_few_steps_say_nothing() -> None:
    config, strange = of(ASYNCHRONOUS), {"clip_fraction": 0.5}
    assert findings_of(config, steps(SKIPPED_STEPS + MIN_COUNTED_STEPS - 1, **strange)) == []
    beginning, rest = steps(SKIPPED_STEPS, **strange), steps(MIN_COUNTED_STEPS)
    assert findings_of(config, [*beginning, *rest]) == []
    assert findings_of(config, [*steps(SKIPPED_STEPS), *steps(MIN_COUNTED_STEPS // 2 - 1, **strange), *rest]) == [], (
        "most steps decide"
    )


@pytest.mark.parametrize(("given", "numbers"), [case[:2] for case in CASES.values()], ids=CASES)
def test_a_single_step_says_nothing(given: dict[str, Any], numbers: dict[str, float]) -> None:
    many = {name: 999.0 for name in ("groups/stale", "skipped", "critic/skipped") if name in numbers}
    assert findings_of(of(given), [*steps(SKIPPED_STEPS + MIN_COUNTED_STEPS), *steps(1, **numbers | many)]) == []


def test_a_server_that_was_lost_for_a_few_steps_says_nothing() -> None:
    lost = steps(MIN_STEPS - 1, **{"groups/stale": 999.0})
    assert findings_of(of(ASYNCHRONOUS), [*steps(SKIPPED_STEPS + MIN_COUNTED_STEPS), *lost]) == []
    assert findings_of(of(ASYNCHRONOUS), [*steps(SKIPPED_STEPS + MIN_COUNTED_STEPS), *lost, *lost[:1]]) != []


@pytest.mark.parametrize("name", ["idle/servers", "idle/actor"])
def test_nothing_is_told_of_a_half_whose_idle_time_is_not_known(name: str) -> None:
    rows = [
        row | {name: None}
        for row in steps(SKIPPED_STEPS + MIN_COUNTED_STEPS, **{"idle/trainer": 0.6, "idle/servers": 0.0})
    ]
    assert findings_of(of(GPUS), rows) == []


def test_a_run_whose_config_is_lost_or_that_has_no_rl_says_nothing() -> None:
    rows = steps(SKIPPED_STEPS + MIN_COUNTED_STEPS, clip_fraction=0.5)
    assert findings_of(None, rows) == []
    assert findings_of(of(SFT_ALONE), rows) == []
    assert findings_of(of(ASYNCHRONOUS), [row | {"job": "sft"} for row in rows]) == []


@pytest.mark.parametrize(("given", "numbers"), [case[:2] for case in CASES.values()], ids=CASES)
def test_the_page_that_is_named_has_that_part(given: dict[str, Any], numbers: dict[str, float]) -> None:
    (found,) = findings_of(of(given), steps(SKIPPED_STEPS + MIN_COUNTED_STEPS, **numbers))
    name, _, part = found.page.partition("#")
    titles = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
    assert not part or part in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_step_that_takes_longer_than_the_grace_is_told_in_every_run_with_a_trainer() -> None:
    rows = [
        {"kind": "train", "job": "sft", "step": step, "attempt": f"a-{step // 3}", "seconds/step": 60.0}
        | {"checkpoint/seconds": 12.0}
        for step in (1, 2, 3, 4)
    ]
    config = make_config(training={"steps": 0, "prompts_per_step": 4, "sft": {"steps": 20}})
    (found,) = findings_of(config, rows)
    assert found.observation.startswith(
        "A step takes 60 s and its checkpoint 12 s, longer than cluster.grace_seconds=25: "
    )
    assert found.change == "Set cluster.grace_seconds=110."
    assert findings_of(config, [*rows[:3], rows[3] | {"seconds/step": 4.0}]) == []
    assert findings_of(config, rows[:3]) == [], "one step of an attempt is not enough"
