"""A step of RL on real models in a world of one process: its order, its numbers, and that it learns."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.config import LossConfig, RunConfig
from pipeline.errors import TrainingError
from pipeline.train.batching import token_advantages
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.policy_update import PolicyUpdate, in_order_of, split_by_prompt
from pipeline.train.loss_specs import SFT, ValueLoss
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.worker_spec import models_of
from tests.fakes.configs import make_config
from tests.support.models.jobs import world_of_one
from tests.support.models.tiny import write_tiny

pytestmark = pytest.mark.integration
VOCABULARY, PROMPTS, SAMPLES = 11, 4, 4


@pytest.fixture(scope="module")
def dispatch() -> Iterator[RankGroup]:
    with world_of_one(tokens=512) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    return write_tiny(tmp_path_factory.mktemp("model"), 0, vocab_size=VOCABULARY, **size)


def a_config(path: Path, loss: dict[str, Any], rank: int = 0, **training: Any) -> RunConfig:
    return make_config(
        model={"path": str(path), "max_length": 8, "lora": {"rank": rank}},
        loss=loss,
        critic={"lr": 1e-2},
        optim={"lr": 1e-2},
        training={"steps": 40, "prompts_per_step": PROMPTS, **training},
        rollout={"temperature": 0.9},
    )


def begun(dispatch: RankGroup, config: RunConfig) -> PolicyUpdate:
    """A fresh job on a fresh policy."""
    for name in list(dispatch.models):
        dispatch.remove_model(name)
    dispatch.init_model("policy", models_of(config, "rl", config.optim, config.training.steps)["policy"])
    update = PolicyUpdate(dispatch, config)
    update.begin(config.optim, config.training.steps, 0)
    return update


def a_row(tokens: Sequence[int], sampled: int, advantage: float, prompt: int, seed: int = 0) -> TrainSequence:
    """A row whose last `sampled` tokens were sampled, at log-probabilities near those of a fresh model."""
    mask = np.zeros(len(tokens), np.uint8)
    mask[len(tokens) - sampled :] = 1
    noise = np.random.default_rng([seed, *tokens]).normal(-np.log(VOCABULARY), 0.2, len(tokens))
    return TrainSequence(np.array(tokens, np.int32), mask, advantage, (noise * mask).astype(np.float32), prompt=prompt)


def some_rows(seed: int = 0) -> list[TrainSequence]:
    """Of four prompts, with one to three sampled tokens each."""
    draw = np.random.default_rng(seed)
    rows = []
    for prompt in range(PROMPTS):
        for _ in range(SAMPLES):
            sampled = int(draw.integers(1, 4))
            tokens = [prompt, *draw.integers(0, VOCABULARY, 1 + sampled).tolist()]
            rows.append(a_row(tokens, sampled, float(draw.normal()), prompt, seed))
    return rows


def parameters(dispatch: RankGroup, name: str = "policy") -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in dispatch.full_parameters(name)}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def taken(worker: ModelWorker) -> int:
    return int(worker.state()["progress"]["taken"])


def test_the_first_ratio_of_a_step_is_exactly_one(dispatch: RankGroup, model: Path) -> None:
    update = begun(dispatch, a_config(model, {"name": "grpo", "old_logprobs": "recompute"}))
    metrics = update.run(some_rows(), 0)
    assert (metrics["ratio_min"], metrics["ratio_max"], metrics["log_ratio_max"]) == (1.0, 1.0, 0.0)
    assert metrics["mismatch"] > 0.01
    assert metrics["optimizer_steps"] == 1


def test_a_single_optimizer_step_takes_its_ratios_over_its_own_pass(dispatch: RankGroup, model: Path) -> None:
    loss = {"name": "grpo", "old_logprobs": "recompute", "tis": "truncate", "tis_cap": 1.1}
    config, rows = a_config(model, loss), some_rows()
    update = begun(dispatch, config)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "forward_models", lambda names, _: calls.extend(names))
        metrics = update.run(rows, 0)
    assert not calls
    found = parameters(dispatch)

    begun(dispatch, config)
    said = dispatch.forward("policy", Batch.of(rows, temperature=config.rollout.temperature))
    complete = [replace(row, old_logprobs=old_logprobs) for row, old_logprobs in zip(rows, said, strict=True)]
    whole = Batch.of(complete, temperature=config.rollout.temperature)
    expected = dispatch.forward_backward("policy", whole, config.loss)
    dispatch.optim_step("policy")
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert 0 < metrics["tis_fraction"] < 1
    for name, tensor in parameters(dispatch).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_rows_say_of_the_policy_of_a_step_is_not_believed(dispatch: RankGroup, model: Path, epochs: int) -> None:
    config = a_config(model, {"name": "grpo", "old_logprobs": "recompute"}, update_epochs=epochs)
    of_a_file = [replace(row, old_logprobs=np.full(len(row), -9.0, np.float32)) for row in some_rows()]
    found, expected = (begun(dispatch, config).run(rows, 0) for rows in (of_a_file, some_rows()))
    assert found == expected


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_is_epochs_times_mini_batches_optimizer_steps_on_what_was_said_at_its_begin(
    dispatch: RankGroup, model: Path, offload: bool
) -> None:
    loss = {"name": "ppo", "old_logprobs": "recompute", "advantage_estimator": "gae", "kl": 0.1, "kl_in": "reward"}
    config = a_config(model, loss, update_epochs=2, mini_batches=2, offload_idle_models=offload)
    update, rows = begun(dispatch, config), some_rows()
    metrics = update.run(rows, 3)
    assert metrics["optimizer_steps"] == 4
    assert dispatch.run_on_ranks("policy", taken) == dispatch.run_on_ranks("critic", taken) == [4]
    found, values = parameters(dispatch), parameters(dispatch, "critic")
    begun(dispatch, config)
    by_hand(dispatch, config, rows, step=3)
    for name, tensor in parameters(dispatch).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    for name, tensor in parameters(dispatch, "critic").items():
        torch.testing.assert_close(values[name], tensor, rtol=0, atol=1e-6)


def by_hand(dispatch: RankGroup, config: RunConfig, rows: list[TrainSequence], step: int) -> None:
    """The same with whole batches that travel with every call."""
    whole = Batch.of(rows, temperature=config.rollout.temperature)
    said = {name: dispatch.forward(name, whole) for name in ("policy", "reference", "critic")}
    due = token_advantages.assign_advantages(rows, config.loss, said["policy"], said["reference"], said["critic"])
    assert due.returns is not None
    complete = [
        TrainSequence(
            row.tokens, row.mask, advantages, row.sampler_logprobs, None, row.prompt, old_logprobs, values, returns
        )
        for row, advantages, old_logprobs, values, returns in zip(
            rows, due.advantages, said["policy"], said["critic"], due.returns, strict=True
        )
    ]
    parts = split_by_prompt(rows, 2, [config.seed, step])
    for epoch in range(2):
        for number in in_order_of(epoch, 2, [config.seed, step]):
            batch = Batch.of([complete[place] for place in parts[number]], temperature=config.rollout.temperature)
            dispatch.forward_backward("critic", batch, ValueLoss(config.critic.clip))
            dispatch.optim_step("critic")
            dispatch.forward_backward("policy", batch, config.loss)
            dispatch.optim_step("policy")


def test_a_fresh_job_copies_the_policy_into_reference_and_critic(dispatch: RankGroup, model: Path) -> None:
    config = a_config(model, {"name": "ppo", "advantage_estimator": "gae", "kl": 0.1})
    update = begun(dispatch, config)
    update.run(some_rows(), 0)
    assert not alike(parameters(dispatch), parameters(dispatch, "reference"))
    PolicyUpdate(dispatch, config).begin(config.optim, config.training.steps, 0)
    assert alike(parameters(dispatch), parameters(dispatch, "reference"))
    assert alike(backbone(parameters(dispatch)), backbone(parameters(dispatch, "critic")))
    assert dispatch.run_on_ranks("policy", taken) == [0]
    assert update.run(some_rows(), 0)["reference_kl"] == 0


def backbone(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("model."): tensor for name, tensor in named.items() if "head" not in name}
    assert len(found) > 10
    return found


def test_replayed_experts_are_those_of_policy_and_reference_in_every_pass_and_the_critic_has_its_own(
    dispatch: RankGroup, tmp_path: Path
) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3}
    path = write_tiny(tmp_path / "mixture", 0, model_type="qwen3_moe", vocab_size=VOCABULARY, **experts)
    loss = {"name": "ppo", "advantage_estimator": "gae", "kl": 0.1, "old_logprobs": "recompute"}
    update = begun(dispatch, a_config(path, loss, routing_replay="rollout"))
    rows = [replace(row, routed_experts=any_experts(len(row))) for row in some_rows()]
    models = ["policy", "reference", "critic"]
    replayed, own = (dispatch.forward_models(models, Batch.of(each)) for each in (rows, some_rows()))
    assert same_rows(replayed["policy"], replayed["reference"])
    assert not same_rows(replayed["policy"], own["policy"])
    assert same_rows(replayed["critic"], own["critic"])

    metrics = update.run(rows, 0)
    assert (metrics["ratio_min"], metrics["ratio_max"], metrics["reference_kl"]) == (1.0, 1.0, 0.0)


def any_experts(tokens: int) -> NDArray[np.uint8]:
    """Two of eight experts for each token and each of two layers, which no router would choose."""
    first = np.arange(2 * tokens).reshape(tokens, 2) * 3
    return np.stack([first % 8, (first + 5) % 8], -1).astype(np.uint8)


def same_rows(some: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def test_the_reference_becomes_the_policy_of_its_time(dispatch: RankGroup, model: Path) -> None:
    update = begun(dispatch, a_config(model, {"name": "grpo", "kl": 0.1, "reference_every": 2}))
    divergences = [update.run(some_rows(step), step)["reference_kl"] for step in range(4)]
    assert [divergence == 0 for divergence in divergences] == [True, False, True, False]


def test_with_adapters_the_reference_is_the_base_until_it_is_refreshed(dispatch: RankGroup, model: Path) -> None:
    loss = {"name": "ppo", "advantage_estimator": "gae", "kl": 0.1, "reference_every": 2}
    update = begun(dispatch, a_config(model, loss, rank=2))
    assert all(".lora_A." in name or ".lora_B." in name for name in parameters(dispatch))
    divergences = [update.run(some_rows(step), step)["reference_kl"] for step in range(3)]
    assert [divergence == 0 for divergence in divergences] == [True, False, True]


def test_a_batch_without_a_counted_token_trains_nothing(dispatch: RankGroup, model: Path) -> None:
    loss = {"name": "ppo", "old_logprobs": "recompute", "advantage_estimator": "gae", "kl": 0.1}
    update = begun(dispatch, a_config(model, loss, mini_batches=2))
    before = parameters(dispatch)
    blank = [
        TrainSequence(row.tokens, row.mask * 0, row.advantages, row.sampler_logprobs, prompt=row.prompt)
        for row in some_rows()
    ]
    total = sum(map(len, blank))
    assert update.run(blank, 0) == {"optimizer_steps": 0, "skipped": 0, "tokens/left_out": total}
    assert alike(parameters(dispatch), before)
    half = [*some_rows()[:4], *blank[4:]]
    assert update.run(half, 0)["tokens/left_out"] == total - sum(map(len, half[:4]))
    half = [*blank[: 2 * SAMPLES], *some_rows()[2 * SAMPLES :]]
    assert update.run(half, 1)["optimizer_steps"] in (1, 2)
    assert not alike(parameters(dispatch), before)


def test_rows_that_do_not_count_change_nothing(dispatch: RankGroup, model: Path) -> None:
    config = a_config(model, {"name": "grpo", "normalize": "prompt"})
    rows = some_rows()
    begun(dispatch, config).run(rows, 0)
    alone = parameters(dispatch)
    cut_off = TrainSequence(
        np.arange(8, dtype=np.int32), np.zeros(8, np.uint8), 5.0, np.zeros(8, np.float32), prompt=99
    )
    begun(dispatch, config).run([cut_off, *rows], 0)
    assert alike(parameters(dispatch), alone)


def test_a_number_that_is_not_finite_is_named_and_nothing_is_trained(dispatch: RankGroup, model: Path) -> None:
    update = begun(dispatch, a_config(model, {"name": "ppo", "advantage_estimator": "gae"}))
    before = parameters(dispatch)
    rows = some_rows()
    rows[3] = a_row([1, 2, 3], 1, float("nan"), 0)
    with pytest.raises(TrainingError, match="row 3: advantages holds a value that is not finite"):
        update.run(rows, 0)
    assert update.is_checkpointable
    assert alike(parameters(dispatch), before)
    assert update.run(some_rows(), 0)["skipped"] == 0


def test_rows_without_what_the_sampling_policy_said_are_refused_and_nothing_is_trained(
    dispatch: RankGroup, model: Path
) -> None:
    update = begun(
        dispatch, a_config(model, {"name": "ppo", "advantage_estimator": "gae", "old_logprobs": "recompute"})
    )
    before, unsampled = parameters(dispatch), [replace(row, sampler_logprobs=None) for row in some_rows()]
    with pytest.raises(TrainingError, match="row 0 has no sampler_logprobs, which a policy loss needs"):
        update.run(unsampled, 0)
    with pytest.raises(TrainingError, match="row 0 has no sampler_logprobs, which a policy loss needs"):
        dispatch.forward_backward("policy", Batch.of(unsampled), LossConfig(name="grpo"))
    assert update.is_checkpointable
    assert alike(parameters(dispatch), before)
    assert update.run(some_rows(), 0)["skipped"] == 0
    assert dispatch.forward_backward("policy", Batch.of(unsampled), SFT)["loss"] > 0


def test_models_are_not_intact_when_a_step_ends_in_between(
    dispatch: RankGroup, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = begun(dispatch, a_config(model, {"name": "grpo"}, mini_batches=2))
    steps: list[str] = []

    def fail_second(name: str) -> dict[str, float]:
        steps.append(name)
        if len(steps) == 2:
            raise TrainingError("the disk is full")
        return RankGroup.optim_step(dispatch, name)

    monkeypatch.setattr(dispatch, "optim_step", fail_second)
    assert update.is_checkpointable
    with pytest.raises(TrainingError, match="the disk is full"):
        update.run(some_rows(), 0)
    assert not update.is_checkpointable


def test_a_job_that_goes_on_takes_the_steps_of_one_that_never_stopped(dispatch: RankGroup, model: Path) -> None:
    loss = {"name": "ppo", "advantage_estimator": "gae", "kl": 0.1, "kl_in": "reward", "reference_every": 2}
    config = a_config(model, loss, update_epochs=2, mini_batches=2)
    update, names = begun(dispatch, config), ("policy", "reference", "critic")
    update.run(some_rows(0), 0)
    kept = {name: dispatch.run_on_ranks(name, snapshot)[0] for name in names}
    uninterrupted = [update.run(some_rows(step), step) for step in (1, 2)]
    ended = {name: parameters(dispatch, name) for name in ("policy", "critic")}
    update = begun(dispatch, config)
    for name in names:
        dispatch.run_on_ranks(name, ModelWorker.load_state, kept[name])
    update = PolicyUpdate(dispatch, config)
    update.begin(config.optim, config.training.steps, 1)
    assert [update.run(some_rows(step), step) for step in (1, 2)] == uninterrupted
    assert all(alike(parameters(dispatch, name), ended[name]) for name in ended)


def snapshot(worker: ModelWorker) -> dict[str, Any]:
    return copy.deepcopy(worker.state())


def test_ppo_with_a_critic_learns_what_is_rewarded(dispatch: RankGroup, model: Path) -> None:
    loss = {"name": "ppo", "advantage_estimator": "gae", "old_logprobs": "recompute"}
    config = a_config(model, loss, update_epochs=2)
    update, draw = begun(dispatch, config), np.random.default_rng(0)
    rewards, errors = [], []
    for step in range(18):
        rows = play(dispatch, draw)
        errors.append(abs(update.run(rows, step)["critic/error"]))
        rewards.append(np.mean([row.advantages for row in rows]))
    assert np.mean(rewards[:3]) < 0.15
    assert np.mean(rewards[-3:]) > 0.6
    assert np.mean(errors) < 0.1


def play(dispatch: RankGroup, draw: np.random.Generator, samples: int = 16) -> list[TrainSequence]:
    """Two tokens sampled from the policy for each prompt p; each that is p + 5, then p + 6, earns a half."""
    rows: list[tuple[list[int], list[float], int]] = [
        ([prompt], [0.0], prompt) for prompt in range(PROMPTS) for _ in range(samples)
    ]
    for _ in range(2):
        chosen = sample([tokens for tokens, _, _ in rows], dispatch, draw)
        rows = [
            ([*tokens, token], [*logprobs, logprob], prompt)
            for (tokens, logprobs, prompt), (token, logprob) in zip(rows, chosen, strict=True)
        ]
    return [
        TrainSequence(
            np.array(tokens, np.int32),
            np.array([0, 1, 1], np.uint8),
            ((tokens[1] == prompt + 5) + (tokens[2] == prompt + 6)) / 2,
            np.array(logprobs, np.float32),
            prompt=prompt,
        )
        for tokens, logprobs, prompt in rows
    ]


def sample(starts: list[list[int]], dispatch: RankGroup, draw: np.random.Generator) -> list[tuple[int, float]]:
    """A next token for each start, and its log-probability."""
    every = sorted({tuple(start) for start in starts})
    candidates = [
        TrainSequence(np.array([*start, token], np.int32), np.array([*[0] * len(start), 1], np.uint8))
        for start in every
        for token in range(VOCABULARY)
    ]
    answers = dispatch.forward("policy", Batch.of(candidates, temperature=0.9))
    table: NDArray[np.float64] = np.array([answer[-1] for answer in answers], np.float64).reshape(len(every), -1)
    found = []
    for start in starts:
        logprobs = table[every.index(tuple(start))]
        weights = np.exp(logprobs)
        token = int(draw.choice(VOCABULARY, p=weights / weights.sum()))
        found.append((token, float(logprobs[token])))
    return found
