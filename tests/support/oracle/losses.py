"""The losses of the oracle, from their definitions: plain numbers in, one float64 scalar for each counted token out.

Shares no code with `pipeline`. In each formula r = exp(logprob − old_logprob) is the ratio, A the advantage, and sg(·)
a number without a gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CLIPPED = ("grpo", "ppo", "dapo", "dr_grpo", "reinforce_pp")
"""Names whose loss is −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A)."""


@dataclass(frozen=True)
class Sequence64:
    """One row: plain Python numbers; those at tokens that are not counted do not matter."""

    tokens: list[int]
    counted: list[bool]
    advantages: list[float]
    sampler_logprobs: list[float]
    old_logprobs: list[float]
    reference: list[float]
    values: list[float]
    returns: list[float]
    prompt: int
    likely: dict[int, dict[int, float]] = field(default_factory=dict)
    """At a counted token, a teacher's log-probabilities of further tokens."""


@dataclass(frozen=True)
class Goal:
    """A loss in numbers: what the configured loss and its normalisation mean."""

    name: str
    normalize: str
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 5.0
    kl: float = 0.0
    kl_estimator: str = "k3"
    entropy: float = 0.0
    max_length: int = 1
    correction: str = "none"
    tis_cap: float = 2.0
    tis_low: float = 0.5
    sequence_mask: float = 0.0
    beta: float = 0.05
    value_clip: float = 0.2
    aux: float = 0.0


def policy_losses(table: Tensor, row: Sequence64, goal: Goal) -> list[Tensor]:
    """From the log-probabilities [T, V] of the whole vocabulary after each prefix of the row."""
    places = [t for t, counted in enumerate(row.counted) if counted]
    logprobs = [table[t - 1, row.tokens[t]] for t in places]
    if goal.name == "sft":
        return [-logprob for logprob in logprobs]
    logs = [logprob - row.old_logprobs[t] for t, logprob in zip(places, logprobs, strict=True)]
    trusted = is_trusted([row.old_logprobs[t] - row.sampler_logprobs[t] for t in places], goal)
    losses = []
    for place, t in enumerate(places):
        loss = policy_loss(logprobs[place], logs, place, row.advantages[t], row.sampler_logprobs[t], goal)
        loss = loss * trusted * correction(row.old_logprobs[t] - row.sampler_logprobs[t], goal)
        if goal.kl and row.likely:
            teacher = {row.tokens[t]: row.reference[t], **row.likely[t]}
            loss = loss + goal.kl * coarse_divergence(table[t - 1], teacher)
        elif goal.kl:
            loss = loss + goal.kl * divergence(logprobs[place] - row.reference[t], goal.kl_estimator)
        if goal.entropy:
            loss = loss + goal.entropy * (table[t - 1].exp() * table[t - 1]).sum()
        losses.append(loss)
    return losses


def policy_loss(
    logprob: Tensor, logs: list[Tensor], place: int, advantage: float, sampler_logprobs: float, goal: Goal
) -> Tensor:
    """Of the counted token at `place`, whose row has the log ratios `logs`; without correction, KL and entropy."""
    ratio, whole = logs[place].exp(), torch.stack(logs).sum()
    if goal.name in CLIPPED:
        return clipped(ratio, advantage, goal)
    if goal.name == "gspo":
        return clipped((whole / len(logs)).exp(), advantage, goal)
    if goal.name == "cispo":
        return -clip(ratio.item(), 1 - goal.clip_low, 1 + goal.clip_high) * advantage * logprob
    if goal.name == "reinforce":
        return -min(ratio.item(), goal.ratio_cap) * advantage * logprob
    if goal.name == "rloo":
        return -min(math.exp(whole.item()), goal.ratio_cap) * advantage * logprob
    if goal.name == "dro":
        return -(advantage * logprob - goal.beta / 2 * (logprob - sampler_logprobs) ** 2)
    raise ValueError(f"the oracle has no formula for {goal.name!r}")


def value_losses(values: Tensor, row: Sequence64, goal: Goal) -> list[Tensor]:
    """½ max((v − R)², (clip(v, v_old ± c) − R)²) of each counted token; ½ (v − R)² with c = 0. `values` is [T]."""
    losses = []
    for t, counted in enumerate(row.counted):
        if counted:
            value, old, target = values[t - 1], row.values[t], row.returns[t]
            free, held = (value - target) ** 2, (clip(value.item(), old - goal.value_clip, old + goal.value_clip))
            inside = abs(value.item() - old) <= goal.value_clip
            if goal.value_clip == 0 or inside or free.item() >= (held - target) ** 2:
                losses.append(free / 2)
            else:
                losses.append(value * 0 + (held - target) ** 2 / 2)
    return losses


def clipped(ratio: Tensor, advantage: float, goal: Goal) -> Tensor:
    low, high = 1 - goal.clip_low, 1 + goal.clip_high
    held = ratio if low <= ratio.item() <= high else torch.tensor(clip(ratio.item(), low, high), dtype=torch.float64)
    free, bounded = ratio * advantage, held * advantage
    return -(free if free.item() <= bounded.item() else bounded)


def correction(difference: float, goal: Goal) -> float:
    """The factor for log(old_logprobs / sampler_logprobs) = `difference`."""
    weight = math.exp(difference)
    if goal.correction == "truncate":
        return min(weight, goal.tis_cap)
    if goal.correction == "mask":
        return weight if goal.tis_low <= weight <= goal.tis_cap else 0.0
    return 1.0


def is_trusted(differences: list[float], goal: Goal) -> bool:
    """Whether a row's geometric mean of old_logprobs / sampler_logprobs is within the sequence's bounds, if any."""
    if not goal.sequence_mask or goal.correction == "none" or not differences:
        return True
    average, most = math.exp(sum(differences) / len(differences)), 1 + goal.sequence_mask
    return 1 / most <= average <= most


def divergence(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference * difference / 2
    if difference.item() < -20:  # counts as −20, and no gradient flows
        return difference * 0 + math.exp(20) - 21
    return torch.exp(-difference) - 1 + difference


def coarse_divergence(table: Tensor, teacher: dict[int, float]) -> Tensor:
    """KL(policy ‖ teacher) over the outcomes that the teacher names and one of all other tokens; `table` is [V]."""
    rest = torch.stack([table[token].exp() for token in range(len(table)) if token not in teacher]).sum()
    rest_of_teacher = 1 - sum(math.exp(logprob) for logprob in teacher.values())
    named = [table[token].exp() * (table[token] - logprob) for token, logprob in teacher.items()]
    return torch.stack(named).sum() + rest * (rest.log() - math.log(rest_of_teacher))


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def mean(values: Sequence[Tensor], count: int = 0) -> Tensor:
    return torch.stack(list(values)).sum() / (count or len(values))
