"""The KL over a teacher's likeliest tokens: the loss and its gradient against float64 over the whole vocabulary."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.algorithms.support_divergence import TAIL, support_kl, support_mass
from pipeline.config import LossConfig, ModelConfig
from pipeline.errors import TrainingError
from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model import lm_head, models
from pipeline.train.model.collate import collate
from pipeline.train.model.lm_head import head_logprobs
from pipeline.train.total_loss import total
from tests.support.models.tiny import VOCABULARY, write_tiny

KL = 0.7
LOSS = LossConfig.model_validate({"name": "reinforce", "kl": KL, "old_logprobs": "sampler", "tis": "none"})
NONE = -math.inf


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_outcomes(policy_V: Tensor, teacher_V: Tensor, support: set[int]) -> Tensor:
    """KL(policy ‖ teacher) over each token of the support and one outcome of all others, from whole distributions."""
    outcomes = [[token] for token in sorted(support)]
    rest = [token for token in range(len(policy_V)) if token not in support]
    terms = []
    for outcome in [*outcomes, rest] if rest else outcomes:
        q, p = policy_V[outcome].exp().sum(), teacher_V[outcome].exp().sum()
        terms.append(q * (q / p).log())
    return torch.stack(terms).sum()


def likeliest(teacher_V: Tensor, target: int, top_k: int) -> list[int]:
    """As a server returns them: the k likeliest tokens, without the target."""
    return [token for token in teacher_V.argsort(descending=True)[:top_k].tolist() if token != target]


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "top_k"), [(1, 2, 1), (7, 5, 3), (13, 50, 8), (3, 11, 11), (5, 9, 40)]
)
@pytest.mark.parametrize("entries", [1 << 26, 60])
def test_loss_and_gradients_of_hidden_states_and_head_are_those_of_whole_distributions(
    tokens: int, vocabulary: int, top_k: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, in one chunk and in several; with k above the vocabulary the teacher returns fewer than k."""
    monkeypatch.setattr(lm_head, "CHUNK", entries)
    hidden, weight = (0.4 * draw(tokens, 6)).requires_grad_(), draw(vocabulary, 6, seed=1).requires_grad_()
    teacher_NV = draw(tokens, vocabulary, seed=2).log_softmax(-1)
    targets = [(3 * index + 1) % vocabulary for index in range(tokens)]
    chosen = [likeliest(teacher_NV[n], target, top_k) for n, target in enumerate(targets)]
    support = torch.tensor(
        [[target, *top, *[0] * (top_k - len(top))] for target, top in zip(targets, chosen, strict=True)]
    )
    present = torch.tensor([[True] * (1 + len(top)) + [False] * (top_k - len(top)) for top in chosen])
    teacher_NK = teacher_NV.gather(1, support).masked_fill(~present, NONE)

    found = support_kl(head_logprobs(hidden, weight, support, 0.8)[0], teacher_NK)
    policy_NV = (hidden @ weight.T / 0.8).log_softmax(-1)
    expected = torch.stack([by_outcomes(policy_NV[n], teacher_NV[n], {targets[n], *chosen[n]}) for n in range(tokens)])
    torch.testing.assert_close(found, expected)
    slopes = draw(tokens, seed=4)
    for gradient, exact in zip(
        torch.autograd.grad((found * slopes).sum(), (hidden, weight)),
        torch.autograd.grad((expected * slopes).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, exact)


ROWS = ((3, 1, 4, 1, 5, 9, 2), (3, 1, 4, 16, 0), (6, 5), (3, 5, 8, 9, 7, 9, 3, 2, 3))
MASKS = ((0, 0, 1, 0, 1, 1, 0), (0, 0, 1, 1, 1), (0, 0), (0, 1, 0, 0, 0, 0, 0, 0, 1))


def teacher_after(row: int, position: int) -> Tensor:
    """The teacher's distribution of a token."""
    return (2 * draw(VOCABULARY, seed=100 * row + position)).log_softmax(-1)


def taught_row(number: int, top_k: int, returned: int) -> TrainSequence:
    """A row with what a teacher returns that has at most `returned` likely tokens."""
    tokens, places = ROWS[number], np.flatnonzero(MASKS[number])
    ids, logprobs = np.zeros((len(places), top_k), np.int32), np.full((len(places), top_k), NONE, np.float32)
    reference = np.zeros(len(tokens), np.float32)
    for index, place in enumerate(places.tolist()):
        teacher_V = teacher_after(number, place)
        reference[place] = teacher_V[tokens[place]]
        top = likeliest(teacher_V, tokens[place], min(top_k, returned))
        ids[index, : len(top)], logprobs[index, : len(top)] = top, teacher_V[top].float().numpy()
    return TrainSequence(
        np.array(tokens, np.int32),
        np.array(MASKS[number], np.uint8),
        advantages=0.0,
        sampler_logprobs=reference,
        reference=reference,
        top_ids=ids,
        top_logprobs=logprobs,
    )


@pytest.mark.parametrize(("top_k", "returned"), [(1, 9), (4, 9), (5, 2)])
@pytest.mark.parametrize("how", ["padded", "packed", "shared"])
def test_the_loss_of_rows_and_its_gradient_are_those_of_the_model_alone(
    how: Packing, top_k: int, returned: int, tmp_path: Path
) -> None:
    """Rows of other lengths with masked tokens, prompts that are alike, and a row without a counted token."""
    write_tiny(tmp_path, 5, initializer_range=0.2)
    policy = models.build_model(ModelConfig(path=str(tmp_path), init="pretrained"), 0, "policy").double()
    batch = Batch.of([taught_row(number, top_k, returned) for number in range(len(ROWS))])
    micro = collate(batch, how, torch.device("cpu"))
    assert micro.support_MK is not None
    logprobs_NK, _ = policy(
        micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M, micro.support_MK, 1.0, False
    )
    loss, sums = total(micro.loss_tokens(logprobs_NK, None), LOSS)

    expected, masses = by_model(policy, top_k, returned)
    torch.testing.assert_close(loss, expected)
    assert sums["support_kl"].item() == pytest.approx(expected.item() / KL * batch.counted)
    assert sums["support_teacher_mass"].item() == pytest.approx(masses)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters)
    for gradient, exact in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-7)


def by_model(policy: Any, top_k: int, returned: int) -> tuple[Tensor, float]:
    """The mean over the counted tokens, each row alone through transformers; and the teacher's mass of the supports."""
    losses, masses = list[Tensor](), 0.0
    for number, tokens in enumerate(ROWS):
        policy_TV = policy.network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        for place in np.flatnonzero(MASKS[number]).tolist():
            teacher_V = teacher_after(number, place).float().double()
            support = {tokens[place], *likeliest(teacher_V, tokens[place], min(top_k, returned))}
            losses.append(by_outcomes(policy_TV[place - 1], teacher_V, support))
            masses += teacher_V[sorted(support)].exp().sum().item()
    return KL * torch.stack(losses).mean(), masses


def test_without_likely_tokens_nothing_changes() -> None:
    """A step with `teacher.top_k=0` makes the tensors of a step without a teacher's likely tokens."""
    rows = [TrainSequence(np.array(tokens, np.int32), np.array(mask)) for tokens, mask in zip(ROWS, MASKS, strict=True)]
    micro = collate(Batch.of(rows), "packed", torch.device("cpu"))
    given = micro.loss_tokens(draw(micro.batch.counted), None)
    assert (micro.support_MK, given.support_NK, given.teacher_support_NK) == (None, None, None)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(0, 12), st.integers(0, 1000), st.floats(0.1, 8))
def test_it_lies_between_zero_and_the_whole_divergence(vocabulary: int, top_k: int, seed: int, scale: float) -> None:
    policy_V, teacher_V = ((scale * draw(vocabulary, seed=seed + more)).log_softmax(-1) for more in (0, 5000))
    whole = (policy_V.exp() * (policy_V - teacher_V)).sum()
    support = [0, *likeliest(teacher_V, 0, top_k)]
    part = support_kl(policy_V[None, support], teacher_V[None, support])
    slack = 40 * TAIL  # of a tail below its lower bound
    assert -slack <= part.item() <= whole.item() + slack
    if len(support) == vocabulary:
        assert part.item() == pytest.approx(whole.item(), abs=slack)


def test_a_policy_that_is_its_teacher_has_no_gradient() -> None:
    logits = draw(5, 9).requires_grad_()
    support = torch.tensor([[0, 3, 8]] * 5)
    policy_NK = logits.log_softmax(-1).gather(1, support)
    (slope,) = torch.autograd.grad(support_kl(policy_NK, policy_NK.detach()).sum(), logits)
    torch.testing.assert_close(slope, torch.zeros_like(slope))


def test_mass_outside_of_the_support_is_drawn_back() -> None:
    """The fault of a truncated sum: its minimum has no mass on the teacher's tokens."""
    teacher_K = torch.tensor([0.6, 0.3, 0.05], dtype=torch.float64).log()
    logits = torch.zeros(8, dtype=torch.float64).requires_grad_()
    for tail in (True, False):
        policy_K = logits.log_softmax(-1)[:3]
        truncated = (policy_K.exp() * (policy_K - teacher_K)).sum()
        loss = support_kl(policy_K[None], teacher_K[None]).sum() if tail else truncated
        (slope,) = torch.autograd.grad(loss, logits)
        assert (slope[3:] > 0).all() == tail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_probabilities_have_finite_numbers_and_gradients(dtype: torch.dtype) -> None:
    """Servers write −9999 for the probability 0; a mass may round to above 1; a whole row may be unlikely."""
    values = [0.0, 1e-7, -1e-9, -1e-4, -9.0, -99.0, -101.0, -9999.0, NONE]
    pairs = torch.tensor([*product(values, values)], dtype=dtype)
    policy_NK = torch.tensor([[-0.1, -8.0], [-30.0, -0.0], [-1e-8, -25.0]], dtype=dtype).repeat(len(pairs), 1)
    policy_NK.requires_grad_()
    kl_N = support_kl(policy_NK, pairs.repeat_interleave(3, 0))
    (slope,) = torch.autograd.grad(kl_N.sum(), policy_NK)
    assert kl_N.isfinite().all()
    assert slope.isfinite().all()
    assert (kl_N[-1], kl_N.min() > -2e-6) == (0, True), "nothing is known of the last row"


def test_float32_is_near_float64_where_a_sum_of_probabilities_would_cancel() -> None:
    policy, teacher = (torch.tensor([[math.log1p(-x), -40.0]], dtype=torch.float64) for x in (3e-2, 2e-5))
    exact = support_kl(policy, teacher)
    torch.testing.assert_close(support_kl(policy.float(), teacher.float()).double(), exact, rtol=1e-4, atol=1e-6)
    assert support_mass(policy, teacher).item() == pytest.approx(0.97)


@pytest.mark.parametrize("with_sampled", [True, False])
def test_with_the_sampled_token_only_the_teacher_itself_has_no_loss(with_sampled: bool) -> None:
    """Each token is sampled now and then. With the likeliest tokens alone the order of all others would stay free."""
    teacher_V = torch.tensor([0.4, 0.3, 0.15, 0.08, 0.05, 0.02], dtype=torch.float64).log()
    logits = torch.tensor([0.0, 0.0, 0.0, 2.0, -1.0, 1.0], dtype=torch.float64).requires_grad_()
    supports = torch.tensor([[token, 0 if token else 1] if with_sampled else [0, 1] for token in range(6)])
    optimizer = torch.optim.Adam([logits], lr=0.02)
    for _ in range(2500):
        policy_V = logits.log_softmax(-1)
        loss = (policy_V.detach().exp() * support_kl(policy_V[supports], teacher_V[supports])).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 1e-5
    distance = (logits.log_softmax(-1).exp() - teacher_V.exp()).abs().max().item()
    assert (distance < 2e-3) == with_sampled


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"top_logprobs": None}, "belong together, and one is missing"),
        ({"reference": None}, "belong together, and one is missing"),
        ({"top_ids": np.zeros((2, 4), np.int32)}, r"have shapes \(2, 4\) and \(3, 4\), expected \(3, k\)"),
        ({"top_ids": np.zeros(3, np.int32)}, r"expected \(3, k\)"),
        ({"top_logprobs": np.full((3, 4), np.nan, np.float32)}, "not a number"),
    ],
)
def test_rows_whose_likely_tokens_do_not_fit_are_refused(changed: dict[str, Any], complaint: str) -> None:
    row = taught_row(0, 4, 9)
    fields = {name: getattr(row, name) for name in ("tokens", "mask", "reference", "top_ids", "top_logprobs")}
    with pytest.raises(TrainingError, match=complaint):
        TrainSequence(**(fields | changed)).check()


def test_rows_of_one_batch_have_one_number_of_likely_tokens() -> None:
    rows = [taught_row(0, 4, 9), taught_row(1, 3, 9)]
    with pytest.raises(TrainingError, match=r"\[3, 4\] likely tokens"):
        Batch.of(rows)
    without = TrainSequence(
        rows[0].tokens, rows[0].mask, sampler_logprobs=rows[0].reference, reference=rows[0].reference
    )
    with pytest.raises(TrainingError, match="row 1 has no top_ids"):
        Batch.of([rows[0], without])
