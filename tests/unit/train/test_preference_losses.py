"""The losses of preference pairs, and the weights that train them, against formulas by hand, autograd and TRL."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.config import PreferenceConfig
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.loop.labeled_terms import labeled_metrics, labeled_outputs, mismatched_rows
from pipeline.train.loop.preference import pair_metrics, pair_outputs, row_weights

LOSSES = ("sigmoid", "ipo", "simpo", "bradley_terry")
SETTINGS: dict[str, dict[str, float]] = {
    "sigmoid": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "margin": 0.5, "label_smoothing": 0.1},
    "bradley_terry": {},
}
KTO = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}
PAIRS: dict[str, list[tuple[int, int, int]]] = {
    "one token each": [(1, 1, 3)],
    "one token beside many": [(1, 40, 2), (40, 1, 2)],
    "long shared prompts": [(3, 5, 300), (5, 3, 300)],
    "a prompt of one token": [(4, 4, 1)],
    "one pair": [(7, 2, 5)],
    "many pairs": [(1 + i % 5, 1 + i % 7, 1 + i % 3) for i in range(33)],
    "ragged rows": [(1, 2, 1), (60, 3, 20), (2, 90, 7)],
    "equal completions": [(6, 6, 4)] * 2,
    "very unlikely completions": [(8, 8, 4)] * 3,
    "certain completions": [(5, 9, 4)] * 2,
}
"""Ten odd batches: counted tokens of the chosen and of the rejected completion, and tokens of the prompt."""


def rows_of(pairs: list[tuple[int, int, int]]) -> list[TrainSequence]:
    rows = []
    for index, (chosen, rejected, prompt) in enumerate(pairs):
        for counted in (chosen, rejected):
            mask = np.array([0] * prompt + [1] * counted, np.uint8)
            rows.append(TrainSequence(np.arange(len(mask), dtype=np.int32), mask, prompt=index))
    return rows


def drawn(name: str, rows: list[TrainSequence], seed: int) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Log-probabilities of each row's tokens, 0 where none is counted, as a forward pass returns them."""
    rng = np.random.default_rng(seed)
    scale = {"very unlikely completions": 300.0, "certain completions": 1e-6}.get(name, 2.0)
    values = [np.float32(-scale * rng.random(len(row)) * np.asarray(row.mask)) for row in rows]
    return [values[index - index % 2] for index in range(len(rows))] if name == "equal completions" else values


def by_hand(loss: str, chosen: Tensor, rejected: Tensor, beta: float, margin: float, smoothing: float) -> Tensor:
    """The loss of one pair from its scores, one formula from each paper."""
    difference = chosen - rejected
    if loss == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if loss == "bradley_terry":
        return -torch.log(torch.exp(chosen) / (torch.exp(chosen) + torch.exp(rejected)))
    logit = beta * difference - (margin if loss == "simpo" else 0)
    return -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_and_the_gradient_of_each_token_are_those_of_autograd(loss: str, name: str) -> None:
    preference = PreferenceConfig(loss=loss, **SETTINGS[loss])
    rows = rows_of(PAIRS[name])
    policy, reference = drawn(name, rows, 1), drawn(name, rows, 2)
    if loss == "bradley_terry":  # the naive formula overflows for the values of unlikely completions
        policy = [np.clip(values, -5, 5) for values in policy]
    named = {"policy": policy} | ({"reference": reference} if preference.formula.has_reference else {})
    outputs = pair_outputs(named, Batch.of(rows), preference)
    loss_P, slope_P = preference.formula.terms(outputs.difference, preference)

    leaves = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in policy]
    scores = []
    for leaf, frozen, row in zip(leaves, reference, rows, strict=True):
        score = leaf.sum()
        if preference.formula.has_reference:
            score = score - float(frozen.sum(dtype=np.float64))
        scores.append(score / row.counted if preference.formula.is_averaged else score)
    arguments = (preference.beta, preference.margin, preference.label_smoothing)
    expected = torch.stack(
        [by_hand(loss, *scores[i : i + 2], *arguments) for i in range(0, len(rows), 2)]  # type: ignore[call-arg]
    )
    expected.mean().backward()  # type: ignore[no-untyped-call]

    np.testing.assert_allclose(loss_P, expected.detach().numpy(), rtol=1e-6, atol=1e-12)
    for leaf, weight in zip(leaves, row_weights(slope_P, outputs, preference), strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad.numpy(), weight, rtol=1e-6, atol=1e-12)
    assert all(map(math.isfinite, pair_metrics(outputs, loss_P, preference).values()))


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_completions_move_nothing_apart_and_are_not_accurate(loss: str) -> None:
    preference = PreferenceConfig(loss=loss, **SETTINGS[loss])
    rows = rows_of(PAIRS["equal completions"])
    policy = drawn("equal completions", rows, 1)
    outputs = pair_outputs({"policy": policy, "reference": policy}, Batch.of(rows), preference)
    loss_P, slope_P = preference.formula.terms(outputs.difference, preference)
    weights = row_weights(slope_P, outputs, preference)
    assert weights[0] == -weights[1], "the same tokens get opposite weights, whose sum is 0"
    assert pair_metrics(outputs, loss_P, preference)["accuracy"] == 0


@pytest.mark.parametrize("difference", [-1e4, -1e308, 1e4, 1e308])
def test_a_large_difference_has_a_finite_loss_and_gradient(difference: float) -> None:
    for loss in ("sigmoid", "simpo", "bradley_terry"):
        preference = PreferenceConfig(loss=loss)
        loss_P, slope_P = preference.formula.terms(np.array([difference]), preference)
        assert np.isfinite(loss_P).all()
        assert (loss_P[0] == 0) == (difference > 0)
        assert np.isfinite(slope_P).all()


def trl_dpo(loss: str, policy: Tensor, mask: Tensor, reference: Tensor, beta: float) -> Tensor:
    """The loss of TRL's `DPOTrainer`, on rows of which the chosen ones come first."""
    module = pytest.importorskip("trl.trainer.dpo_trainer")
    rows, chosen = len(policy), len(policy) // 2
    outputs = SimpleNamespace(
        log_probs=policy,
        entropy=torch.zeros_like(policy),
        mean_logits=torch.zeros_like(policy),
        is_top1=torch.zeros_like(policy, dtype=torch.bool),
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(),
    )
    inputs = {
        "input_ids": torch.zeros(rows, policy.shape[1] + 1, dtype=torch.long),
        "attention_mask": torch.ones(rows, policy.shape[1] + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(rows, 1), mask], dim=1).long(),
        "ref_chosen_logps": reference[:chosen],
        "ref_rejected_logps": reference[chosen:],
    }
    result: Tensor = module.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return result


def trl_simpo(policy: Tensor, mask: Tensor, beta: float, margin: float, smoothing: float) -> Tensor:
    """The loss of TRL's `CPOTrainer` for SimPO."""
    module = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    trainer = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo",
        simpo_gamma=margin,
        beta=beta,
        label_smoothing=smoothing,
    )
    chosen, rejected = (policy.sum(1) / mask.sum(1)).chunk(2)
    losses: Tensor = module.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]
    return losses.mean()


def labeled_rows_of(pairs: list[tuple[int, int, int]]) -> list[TrainSequence]:
    """The rows of `rows_of` as labeled completions, of which a few have the other label."""
    return [replace(row, label=(index % 2 == 0) != (index % 5 == 3)) for index, row in enumerate(rows_of(pairs))]


def trl_kto(
    policy: Tensor, reference: Tensor, mask: Tensor, rows: list[TrainSequence], kl: tuple[Tensor, Tensor], beta: float
) -> Tensor:
    """The loss of TRL's `KTOTrainer`; `kl` has the log-probabilities of the mismatched rows by both models."""
    module = pytest.importorskip("trl.trainer.kto_trainer")
    outputs = SimpleNamespace(
        log_probs=policy, entropy=torch.zeros_like(policy), mean_logits=torch.zeros_like(policy), aux_loss=None
    )
    width = policy.shape[1] + 1
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=KTO["desirable_weight"],
        undesirable_weight=KTO["undesirable_weight"],
        _compute_kl_logps=lambda *_: kl[0],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.long),
        "attention_mask": torch.ones(len(rows), width, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(len(rows), 1), mask], dim=1).long(),
        "label": torch.tensor([row.label for row in rows]),
        "ref_logps": reference,
        "ref_KL_logps": kl[1],
    }
    result: Tensor = module.KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return result


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("by", ["hand", "trl"])
def test_kto_has_the_loss_and_the_gradient_of_the_paper_and_of_trl(by: str, name: str) -> None:
    preference = PreferenceConfig(loss="kto", **KTO)
    rows = labeled_rows_of(PAIRS[name])
    every = [*rows, *mismatched_rows(rows, 400)]
    policy, reference = drawn(name, every, 1), drawn(name, every, 2)
    outputs = labeled_outputs({"policy": policy, "reference": reference}, rows)
    loss_N, slope_N = outputs.terms(preference)
    count = len(rows)

    mask = padded([np.asarray(row.mask, np.float64) for row in rows])
    logprobs = padded(policy[:count]).requires_grad_()
    frozen = padded(reference[:count]).sum(1)
    kl = padded(policy[count:]).sum(1), padded(reference[count:]).sum(1)
    if by == "trl":
        theirs = trl_kto(logprobs, frozen, mask, rows, kl, preference.beta)
    else:
        labels = torch.tensor([row.label for row in rows])
        divergence = (kl[0] - kl[1]).mean().clamp(min=0)
        value = torch.sigmoid(torch.where(labels, 1, -1) * preference.beta * (logprobs.sum(1) - frozen - divergence))
        scale = torch.where(labels, KTO["desirable_weight"], KTO["undesirable_weight"])
        theirs = (scale - scale * value).mean()
    theirs.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert loss_N.mean() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-12)
    for index in range(count):
        counted = mask[index].bool()
        np.testing.assert_allclose(logprobs.grad[index][counted].numpy(), slope_N[index] / count, rtol=1e-6, atol=1e-12)
    assert all(map(math.isfinite, labeled_metrics([outputs], preference).values()))


def test_a_mismatched_row_has_its_own_prompt_and_the_completion_of_the_row_before() -> None:
    one = TrainSequence(np.array([1, 2, 3, 4], np.int32), np.array([0, 0, 1, 1], np.uint8), prompt=0)
    other = TrainSequence(np.array([5, 6, 7, 8], np.int32), np.array([0, 1, 0, 1], np.uint8), prompt=1)
    first, second = mismatched_rows([one, other], 64)
    assert (first.tokens.tolist(), first.mask.tolist(), first.prompt) == ([1, 2, 6, 7, 8], [0, 0, 1, 0, 1], 0)
    assert (second.tokens.tolist(), second.mask.tolist(), second.prompt) == ([5, 3, 4], [0, 1, 1], 1)
    assert mismatched_rows([one, other], 3)[0].tokens.tolist() == [1, 2, 6], "cut as a row of the run is"
    assert mismatched_rows([one], 64) == [], "a completion is not mismatched with its own prompt"
    assert labeled_outputs({"policy": [np.ones(4)], "reference": [np.zeros(4)]}, [one]).kl == 0


def padded(values: list[np.ndarray[Any, Any]]) -> Tensor:
    """The values of each row without its first token, padded at the right with 0."""
    width = max(map(len, values)) - 1
    return torch.tensor(np.stack([np.pad(v[1:], (0, width + 1 - len(v))) for v in values]), dtype=torch.float64)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo"])
def test_the_loss_and_the_gradient_are_those_of_trl(loss: str, name: str) -> None:
    pytest.importorskip("trl")
    preference = PreferenceConfig(loss=loss, **SETTINGS[loss])
    rows = rows_of(PAIRS[name])
    policy, reference = drawn(name, rows, 1), drawn(name, rows, 2)
    outputs = pair_outputs({"policy": policy, "reference": reference}, Batch.of(rows), preference)
    if loss == "simpo":
        outputs = pair_outputs({"policy": policy}, Batch.of(rows), preference)
    loss_P, slope_P = preference.formula.terms(outputs.difference, preference)
    weights = row_weights(slope_P, outputs, preference)

    order = [*range(0, len(rows), 2), *range(1, len(rows), 2)]  # TRL's batches have all chosen rows first
    mask = padded([np.asarray(rows[i].mask, np.float64) for i in order])
    logprobs = padded([policy[i] for i in order]).requires_grad_()
    frozen = padded([reference[i] for i in order]).sum(1)
    theirs = (
        trl_simpo(logprobs, mask, preference.beta, preference.margin, preference.label_smoothing)
        if loss == "simpo"
        else trl_dpo(loss, logprobs, mask, frozen, preference.beta)
    )
    theirs.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert loss_P.mean() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-12)
    for position, index in enumerate(order):
        counted = mask[position].bool()
        np.testing.assert_allclose(logprobs.grad[position][counted].numpy(), weights[index], rtol=1e-6, atol=1e-12)
