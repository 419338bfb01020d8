"""The trainer's arithmetic once more: one process, float64, one row and one token at a time.

Shares no code with `pipeline`: its own Qwen3 forward from the published architecture, its own losses, denominators and
AdamW. Slow and plain on purpose; nothing is packed, padded, cut, sharded or reduced.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """What the forward needs to know of the architecture."""

    layers: int
    heads: int
    groups: int
    size: int
    theta: float = 10_000.0
    eps: float = 1e-6


@dataclass(frozen=True)
class Sequence64:
    """One row: plain Python numbers, `None` where a number is not counted."""

    tokens: list[int]
    counted: list[bool]
    advantages: list[float]
    behaviour: list[float]
    reference: list[float]
    prompt: int


@dataclass(frozen=True)
class Goal:
    """A loss in numbers: what `LossConfig` and `Batch.of` mean."""

    name: str
    normalise: str
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 5.0
    kl: float = 0.0
    kl_estimator: str = "k3"
    entropy: float = 0.0
    max_length: int = 1


@dataclass(frozen=True)
class Adam:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float


@dataclass
class Training:
    """What three steps did: the loss and the gradients before each step, and the parameters after the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Parameters] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [T, heads, D]: each head's vector turned by position: pairs (i, i + half) by position / theta^(i / half)."""
    half = x.shape[-1] // 2
    rates = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rates
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def attention(p: Parameters, prefix: str, x: Tensor, shape: Shape) -> Tensor:
    """x: [T, E] of one row; each token sees itself and those before it."""
    length = len(x)
    query = (x @ p[f"{prefix}.q_proj.weight"].T).view(length, shape.heads, shape.size)
    key = (x @ p[f"{prefix}.k_proj.weight"].T).view(length, shape.groups, shape.size)
    value = (x @ p[f"{prefix}.v_proj.weight"].T).view(length, shape.groups, shape.size)
    query = rotated(normed(query, p[f"{prefix}.q_norm.weight"], shape.eps), shape.theta)
    key = rotated(normed(key, p[f"{prefix}.k_norm.weight"], shape.eps), shape.theta)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(shape.heads):
        group = head * shape.groups // shape.heads
        scores = query[:, head] @ key[:, group].T / math.sqrt(shape.size)
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value[:, group])
    return torch.cat(heads, -1) @ p[f"{prefix}.o_proj.weight"].T


def predictions(p: Parameters, tokens: Sequence[int], shape: Shape, temperature: float) -> Tensor:
    """Log-probabilities of every token of the vocabulary after each prefix of one row: [T, V]."""
    x = p["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        x = x + attention(p, f"{name}.self_attn", normed(x, p[f"{name}.input_layernorm.weight"], shape.eps), shape)
        y = normed(x, p[f"{name}.post_attention_layernorm.weight"], shape.eps)
        gate, up = y @ p[f"{name}.mlp.gate_proj.weight"].T, y @ p[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ p[f"{name}.mlp.down_proj.weight"].T
    head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    logits = normed(x, p["model.norm.weight"], shape.eps) @ head.T / temperature
    return logits - logits.logsumexp(-1, keepdim=True)


def row_losses(table: Tensor, row: Sequence64, goal: Goal) -> list[Tensor]:
    """The loss of each counted token of a row, unweighted, in order."""
    places = [t for t, counted in enumerate(row.counted) if counted]
    logprobs = [table[t - 1, row.tokens[t]] for t in places]
    if goal.name == "sft":
        return [-logprob for logprob in logprobs]
    logs = [logprob - row.behaviour[t] for logprob, t in zip(logprobs, places, strict=True)]
    if goal.name == "gspo" and logs:
        logs = [torch.stack(logs).mean()] * len(logs)
    losses = []
    for t, logprob, log in zip(places, logprobs, logs, strict=True):
        loss = token_loss(logprob, log.exp(), row.advantages[t], goal)
        if goal.kl:
            loss = loss + goal.kl * divergence(logprob - row.reference[t], goal.kl_estimator)
        if goal.entropy:
            loss = loss + goal.entropy * (table[t - 1].exp() * table[t - 1]).sum()
        losses.append(loss)
    return losses


def token_loss(logprob: Tensor, ratio: Tensor, advantage: float, goal: Goal) -> Tensor:
    if goal.name == "reinforce":
        return -min(ratio.item(), goal.ratio_cap) * advantage * logprob
    low, high = 1 - goal.clip_low, 1 + goal.clip_high
    within = low <= ratio.item() <= high
    bounded = ratio if within else torch.tensor(low if ratio.item() < low else high, dtype=torch.float64)
    free, held = ratio * advantage, bounded * advantage
    return -(free if free.item() <= held.item() else held)


def divergence(difference: Tensor, estimator: str) -> Tensor:
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: torch.exp(-d) - 1 + d,
    }
    return formulas[estimator](difference)


def batch_loss(p: Parameters, rows: Sequence[Sequence64], shape: Shape, goal: Goal) -> Tensor:
    """The mean of means that `goal.normalise` names, over all rows at once."""
    of_rows = [row_losses(predictions(p, row.tokens, shape, goal.temperature), row, goal) for row in rows]
    if goal.normalise == "fixed":
        return mean([loss for losses in of_rows for loss in losses], len(rows) * goal.max_length)
    if goal.normalise == "token":
        return mean([loss for losses in of_rows for loss in losses])
    if goal.normalise == "sequence":
        return mean([mean(losses) for losses in of_rows if losses])
    prompts: dict[int, list[Tensor]] = {}
    for row, losses in zip(rows, of_rows, strict=True):
        prompts.setdefault(row.prompt, []).extend(losses)
    return mean([mean(losses) for losses in prompts.values() if losses])


def mean(values: list[Tensor], count: int = 0) -> Tensor:
    return torch.stack(values).sum() / (count or len(values))


def train(start: Parameters, rows: Sequence[Sequence64], shape: Shape, goal: Goal, adam: Adam, steps: int) -> Training:
    """`steps` steps of AdamW with a constant rate on the same rows."""
    p = {name: value.double().clone().requires_grad_() for name, value in start.items()}
    first = {name: torch.zeros_like(value) for name, value in p.items()}
    second = {name: torch.zeros_like(value) for name, value in p.items()}
    done = Training()
    for step in range(1, steps + 1):
        loss = batch_loss(p, rows, shape, goal)
        slopes = dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))
        norm = math.sqrt(sum(float((slope * slope).sum()) for slope in slopes.values()))
        done.losses.append(loss.item())
        done.gradients.append(slopes)
        done.norms.append(norm)
        scale = min(1.0, adam.clip_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, value in p.items():
                slope = slopes[name] * scale
                first[name] = adam.beta1 * first[name] + (1 - adam.beta1) * slope
                second[name] = adam.beta2 * second[name] + (1 - adam.beta2) * slope * slope
                if value.ndim > 1:
                    value *= 1 - adam.lr * adam.weight_decay
                corrected = first[name] / (1 - adam.beta1**step)
                spread = (second[name] / (1 - adam.beta2**step)).sqrt()
                value -= adam.lr * corrected / (spread + adam.eps)
    done.parameters = {name: value.detach() for name, value in p.items()}
    return done
