"""The oracle asked about a recipe, and how far the ranks' result is from its answer. Needs no pytest."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.loss_specs import SupervisedLoss, ValueLoss
from tests.support.oracle import arithmetic as oracle
from tests.support.oracle.cases import (
    ALPHA,
    BALANCED,
    BIAS_RATE,
    FAMILIES,
    GROUPS,
    HEADS,
    LAYERS,
    MAX_LENGTH,
    OPTIM,
    RECIPES,
    SIZE,
    STEPS,
    Arrays,
    Recipe,
    make_rows,
    start_of,
)
from tests.support.oracle.losses import Goal, Sequence64
from tests.support.oracle.ways import Dtype, Result

AUX_LOSS = "experts/aux_loss"
ADAM = oracle.Adam(OPTIM.lr, OPTIM.beta1, OPTIM.beta2, OPTIM.eps, OPTIM.weight_decay, OPTIM.clip_norm)
Errors = dict[str, float]
FLOAT32: Errors = {
    "start": 0,
    "answer": 1e-5,
    "loss": 1e-5,
    "norm": 1e-4,
    "entry": 3e-5,
    "gradient": 3e-5,
    "parameter": 5e-6,
    "update": 2e-5,
}
"""Bounds of `errors` for float32 against float64, on the CPU."""
CUDA_FLOAT32 = {kind: 5 * bound for kind, bound in FLOAT32.items()}
"""The same on a GPU, whose sums are taken in other orders."""
BFLOAT16: Errors = {"answer": 0.15, "loss": 0.03, "norm": 0.15, "gradient": 0.25, "parameter": 0.02, "update": 0.12}
"""Bounds for bf16 compute with float32 parameters."""
CLIPPED_BFLOAT16: Errors = {"answer": 0.15, "loss": 0.06}
"""The same for losses that a clip cuts off: the gradient of a token whose ratio is near its bound is there or is not,
as the rounding goes, so neither it nor what follows from it says anything."""
SMOOTH = ("sft", "lora_sft", "value_free", "cispo", "rloo", "dro", "reinforce")
"""Recipes whose gradient has no jumps (the weights of some have bounds, but no gradient)."""


def loose_bounds(recipe: str, dtype: Dtype) -> Errors:
    """Bounds for compute in 16 bits; float16 has three more significant bits than bf16."""
    bounds = BFLOAT16 if recipe in SMOOTH else CLIPPED_BFLOAT16
    return bounds if dtype == "bfloat16" else {kind: bound / 8 for kind, bound in bounds.items()}


@cache
def truth(model: Path, recipe: str, aux: float = 0.0, replayed: bool = False) -> oracle.Training:
    """What `STEPS` steps of the recipe do, in float64, with this coefficient of the auxiliary loss and experts that
    are `replayed` or chosen by routers."""
    chosen = RECIPES[recipe]
    trained, frozen = (_exact(arrays) for arrays in start_of(chosen, model))
    rows = [plain(row) for row in make_rows(recipe)]
    shape = replace(shape_of(chosen, model), replayed=replayed)
    return oracle.train(trained, frozen, rows, shape, replace(goal_of(chosen), aux=aux), ADAM, STEPS)


@cache
def answers(model: Path, recipe: str, replayed: bool = False) -> list[NDArray[np.float64]]:
    """What `forward` must say of each row before the first step."""
    chosen = RECIPES[recipe]
    trained, frozen = (_exact(arrays) for arrays in start_of(chosen, model))
    whole = frozen | trained
    rows = [plain(row) for row in make_rows(recipe)]
    shape = replace(shape_of(chosen, model), replayed=replayed)
    return [np.array(oracle.answers(whole, row, shape, goal_of(chosen))) for row in rows]


def errors(result: Result, model: Path, recipe: str, aux: float = 0.0, replayed: bool = False) -> Errors:
    """The largest error of each kind, over all steps.

    - `start`, `answer`, `parameter`: absolute, of any number.
    - `loss`: of the loss and the auxiliary one, relative to 1 + |loss|; `norm` (of the gradient): relative.
    - `entry`: of a gradient's entry, relative to the largest of its tensor plus 1/30.
    - `gradient`, `update` (all that the steps changed): relative L2 distance over all tensors.

    Raises `AssertionError` when the result has other parameters than the oracle.
    """
    exact, steps = truth(model, recipe, aux, replayed), range(STEPS)
    exact_answers = answers(model, recipe, replayed)
    first = {name: values.numpy() for name, values in _exact(start_of(RECIPES[recipe], model)[0]).items()}
    slopes = [_pairs(result.gradients[step], exact.gradients[step]) for step in steps]
    ends = _pairs(result.parameters, exact.parameters)
    losses = [(result.metrics[step]["loss"], exact.losses[step]) for step in steps]
    losses += [(result.metrics[step][AUX_LOSS], exact.auxiliary[step]) for step in steps if aux]
    norms = [(result.metrics[step]["grad_norm"], exact.norms[step]) for step in steps]
    return {
        "start": _worst(_largest(a - first[name]) for name, (a, _) in _pairs(result.start, exact.parameters).items()),
        "answer": _worst(_largest(a - b) for a, b in zip(result.answers, exact_answers, strict=True)),
        "loss": _worst(abs(a - b) / (1 + abs(b)) for a, b in losses),
        "norm": _worst(abs(a / b - 1) for a, b in norms),
        "entry": _worst(_largest(a - b) / (_largest(b) + 1 / 30) for pairs in slopes for a, b in pairs.values()),
        "gradient": _worst(_distance(pairs.values()) for pairs in slopes),
        "parameter": _worst(_largest(a - b) for a, b in ends.values()),
        "update": _distance((a - first[name], b - first[name]) for name, (a, b) in ends.items()),
    }


def excess(found: Errors, bounds: Errors) -> Errors:
    """The errors that are not within their bounds; an error that is not a number is none of them."""
    return {kind: found[kind] for kind, bound in bounds.items() if not found[kind] <= bound}


def goal_of(recipe: Recipe) -> Goal:
    objective = recipe.objective
    if isinstance(objective, SupervisedLoss):
        return Goal("sft", recipe.normalize, recipe.temperature, max_length=MAX_LENGTH)
    if isinstance(objective, ValueLoss):
        return Goal("value", recipe.normalize, value_clip=objective.clip, max_length=MAX_LENGTH)
    return Goal(
        name=objective.name,
        normalize=recipe.normalize,
        temperature=recipe.temperature,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ratio_cap=objective.ratio_cap,
        kl=objective.kl if objective.kl_in == "loss" else 0.0,
        kl_estimator=objective.kl_estimator,
        entropy=objective.entropy,
        max_length=MAX_LENGTH,
        correction=objective.tis,
        tis_cap=objective.tis_cap,
        tis_low=objective.tis_low,
        sequence_mask=objective.sequence_mask,
        beta=objective.beta,
    )


def shape_of(recipe: Recipe, model: Path) -> oracle.Shape:
    scale = ALPHA / recipe.lora if recipe.lora else 0.0
    family = next((family for family in FAMILIES if family == model.name), "")
    settings = FAMILIES[family]
    taken, rate = settings["num_experts_per_tok"], BIAS_RATE if family in BALANCED and not recipe.lora else 0.0
    shape = oracle.Shape(LAYERS, HEADS, GROUPS, SIZE, scale=scale, taken=taken, bias_rate=rate)
    named = {name: settings[key] for name, key in _KEYS.items() if key in settings}
    return replace(shape, **named)


_KEYS = {
    "rotary": "partial_rotary_factor",
    "teams": "n_group",
    "chosen_teams": "topk_group",
    "routed": "routed_scaling_factor",
    "latent": "kv_lora_rank",
    "turning": "qk_rope_head_dim",
    "window": "sliding_window",
}
"""What `Shape` calls the keys of configs."""


def plain(row: TrainSequence) -> Sequence64:
    """The row in plain numbers; without a old policy the ratio is over the one that sampled."""

    def numbers(values: object) -> list[float]:
        if values is None:
            return [float("nan")] * len(row)
        return [float(x) for x in np.broadcast_to(np.asarray(values, np.float64), len(row))]

    return Sequence64(
        tokens=[int(token) for token in row.tokens],
        counted=[bool(counted) for counted in row.mask],
        advantages=numbers(row.advantages),
        sampler_logprobs=numbers(row.sampler_logprobs),
        old_logprobs=numbers(row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs),
        reference=numbers(row.reference),
        values=numbers(row.values),
        returns=numbers(row.returns),
        prompt=row.prompt,
        likely=likely_tokens(row),
    )


def likely_tokens(row: TrainSequence) -> dict[int, dict[int, float]]:
    """A teacher's log-probabilities of likely tokens, by the position of the counted token."""
    if row.top_ids is None or row.top_logprobs is None:
        return {}
    at_tokens = zip(np.flatnonzero(row.mask).tolist(), row.top_ids, row.top_logprobs, strict=True)
    return {
        place: {
            int(token): float(logprob) for token, logprob in zip(ids, logprobs, strict=True) if np.isfinite(logprob)
        }
        for place, ids, logprobs in at_tokens
    }


def _exact(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values).double() for name, values in arrays.items()}


Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


def _pairs(found: Arrays, exact: Mapping[str, Tensor]) -> dict[str, Pair]:
    assert set(found) == set(exact), f"other parameters than the oracle's: {sorted(set(found) ^ set(exact))}"
    return {name: (found[name].astype(np.float64), value.detach().numpy()) for name, value in exact.items()}


def _largest(values: NDArray[np.float64]) -> float:
    return float(np.abs(values).max())


def _worst(values: Iterable[float]) -> float:
    """The largest; not a number if one of them is none."""
    return float(np.max([*values]))


def _distance(pairs: Iterable[Pair]) -> float:
    """‖a − b‖ / ‖b‖ over all tensors."""
    off, whole = 0.0, 0.0
    for a, b in pairs:
        off, whole = off + float(((a - b) ** 2).sum()), whole + float((b**2).sum())
    return float(np.sqrt(off / whole))
