"""The trainer's arithmetic once more: one process, float64, one row and one token at a time.

Shares no code with `pipeline`: its own Qwen3 forward from the published architecture, its own adapters and value head,
its own losses (`oracle_losses`), denominators and AdamW. Slow and plain on purpose; nothing is packed, padded, cut,
sharded or reduced.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.oracle.losses import Goal, Sequence64, mean, policy_losses, value_losses

Parameters = dict[str, Tensor]
BIAS = "e_score_correction_bias"
"""The bias of a router, which has no gradient."""


@dataclass(frozen=True)
class Shape:
    """What the forward needs to know of the architecture; `scale` is alpha / rank of the adapters, `taken` the experts
    of a token in a mixture. Of GLM-4.5, `rotary` is the part of a head that is rotated, `teams` the groups of experts
    of which a token goes to one, `routed` the factor of what experts say, and `bias_rate` how far their bias moves at a
    step. `loads` counts the tokens of each expert, by the layer's name and its number."""

    layers: int
    heads: int
    groups: int
    size: int
    theta: float = 10_000.0
    eps: float = 1e-6
    scale: float = 0.0
    taken: int = 0
    rotary: float = 1.0
    teams: int = 1
    routed: float = 1.0
    bias_rate: float = 0.0
    loads: Counter[tuple[str, int]] = field(default_factory=Counter, compare=False)


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
    """What some steps did: the loss and the gradients before each step, and the parameters after the last."""

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


def turned(x: Tensor, shape: Shape) -> Tensor:
    """x [T, heads, D] with the first part of each head rotated."""
    size = round(x.shape[-1] * shape.rotary)
    return torch.cat([rotated(x[..., :size], shape.theta), x[..., size:]], -1)


def linear(p: Mapping[str, Tensor], name: str, x: Tensor, shape: Shape) -> Tensor:
    """x [T, in] by the layer's matrix, to which an adapter adds alpha / rank · B A."""
    matrix = p[f"{name}.weight"]
    if f"{name}.lora_A.weight" in p:
        matrix = matrix + shape.scale * p[f"{name}.lora_B.weight"] @ p[f"{name}.lora_A.weight"]
    return x @ matrix.T


def attention(p: Mapping[str, Tensor], prefix: str, x: Tensor, shape: Shape) -> Tensor:
    """x: [T, E] of one row; each token sees itself and those before it."""
    length = len(x)
    query = linear(p, f"{prefix}.q_proj", x, shape).view(length, shape.heads, shape.size)
    key = linear(p, f"{prefix}.k_proj", x, shape).view(length, shape.groups, shape.size)
    value = linear(p, f"{prefix}.v_proj", x, shape).view(length, shape.groups, shape.size)
    query = turned(normed(query, p[f"{prefix}.q_norm.weight"], shape.eps), shape)
    key = turned(normed(key, p[f"{prefix}.k_norm.weight"], shape.eps), shape)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(shape.heads):
        group = head * shape.groups // shape.heads
        scores = query[:, head] @ key[:, group].T / math.sqrt(shape.size)
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value[:, group])
    return linear(p, f"{prefix}.o_proj", torch.cat(heads, -1), shape)


def multiplied(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape) -> Tensor:
    """y [..., E] through the two inner matrices and the outer one of a layer, or of an expert."""
    gate, up = linear(p, f"{name}.gate_proj", y, shape), linear(p, f"{name}.up_proj", y, shape)
    return linear(p, f"{name}.down_proj", gate * torch.sigmoid(gate) * up, shape)


def mixed(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape) -> Tensor:
    """y [T, E], each token through the experts that its router likes best, weighted by how much it likes them."""
    likes = linear(p, f"{name}.gate", y, shape).softmax(-1)
    tokens = []
    for token, of_token in zip(y, likes, strict=True):
        best = sorted(range(len(of_token)), key=lambda expert: -of_token[expert].item())[: shape.taken]
        parts = [of_token[expert] * multiplied(p, f"{name}.experts.{expert}", token, shape) for expert in best]
        tokens.append(torch.stack(parts).sum(0) / of_token[best].sum())
    return torch.stack(tokens)


def routed(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape) -> Tensor:
    """y [T, E] as GLM-4.5 has it: experts are chosen by sigmoid scores plus a bias, in the best group of experts by its
    two best; weighted by the scores without it; beside them, an expert that every token goes to."""
    bias, tokens = p[f"{name}.gate.{BIAS}"], []
    for token, scores in zip(y, linear(p, f"{name}.gate", y, shape).sigmoid(), strict=True):
        likes = [score + extra for score, extra in zip(scores.tolist(), bias.tolist(), strict=True)]
        size = len(likes) // shape.teams
        teams = [range(first, first + size) for first in range(0, len(likes), size)]
        team = max(teams, key=lambda team: sum(sorted((likes[expert] for expert in team), reverse=True)[:2]))
        best = sorted(team, key=lambda expert: -likes[expert])[: shape.taken]
        shape.loads.update((name, expert) for expert in best)
        parts = [scores[expert] * multiplied(p, f"{name}.experts.{expert}", token, shape) for expert in best]
        tokens.append(shape.routed * torch.stack(parts).sum(0) / scores[best].sum())
    return torch.stack(tokens) + multiplied(p, f"{name}.shared_experts", y, shape)


def balanced(p: Mapping[str, Tensor], shape: Shape) -> None:
    """Move each bias toward the experts that got fewer tokens than the mean of their layer."""
    for key, bias in p.items():
        if key.endswith(BIAS):
            counts = [shape.loads[key.removesuffix(f".gate.{BIAS}"), expert] for expert in range(len(bias))]
            for expert, count in enumerate(counts):
                lacking = sum(counts) - len(counts) * count
                bias[expert] += shape.bias_rate * ((lacking > 0) - (lacking < 0))


def fed(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape) -> Tensor:
    """y [T, E] through a layer's matrices, or through experts."""
    if f"{name}.gate.{BIAS}" in p:
        return routed(p, name, y, shape)
    return (mixed if f"{name}.gate.weight" in p else multiplied)(p, name, y, shape)


def states(p: Mapping[str, Tensor], tokens: Sequence[int], shape: Shape) -> Tensor:
    """The last hidden states after each prefix of one row: [T, E]."""
    x = p["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        x = x + attention(p, f"{name}.self_attn", normed(x, p[f"{name}.input_layernorm.weight"], shape.eps), shape)
        y = normed(x, p[f"{name}.post_attention_layernorm.weight"], shape.eps)
        x = x + fed(p, f"{name}.mlp", y, shape)
    return normed(x, p["model.norm.weight"], shape.eps)


def predictions(p: Mapping[str, Tensor], tokens: Sequence[int], shape: Shape, temperature: float) -> Tensor:
    """Log-probabilities of every token of the vocabulary after each prefix of one row: [T, V]."""
    head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    logits = states(p, tokens, shape) @ head.T / temperature
    return logits - logits.logsumexp(-1, keepdim=True)


def values(p: Mapping[str, Tensor], tokens: Sequence[int], shape: Shape) -> Tensor:
    """What a critic says after each prefix of one row: [T]."""
    return (states(p, tokens, shape) * p["head.weight"][0]).sum(-1) + p["head.bias"][0]


def answers(p: Mapping[str, Tensor], row: Sequence64, shape: Shape, goal: Goal) -> list[float]:
    """What `forward` must return for a row: the number of each counted token, 0 elsewhere."""
    with torch.no_grad():
        if goal.name == "value":
            given = values(p, row.tokens, shape)
            found = [given[t - 1] for t in range(1, len(row.tokens))]
        else:
            table = predictions(p, row.tokens, shape, goal.temperature)
            found = [table[t - 1, row.tokens[t]] for t in range(1, len(row.tokens))]
    return [0.0] + [float(x) if counted else 0.0 for x, counted in zip(found, row.counted[1:], strict=True)]


def losses_of(p: Mapping[str, Tensor], row: Sequence64, shape: Shape, goal: Goal) -> list[Tensor]:
    """The loss of each counted token of a row, unweighted, in order."""
    if goal.name == "value":
        return value_losses(values(p, row.tokens, shape), row, goal)
    return policy_losses(predictions(p, row.tokens, shape, goal.temperature), row, goal)


def batch_loss(p: Mapping[str, Tensor], rows: Sequence[Sequence64], shape: Shape, goal: Goal) -> Tensor:
    """The mean of means that `goal.normalize` names, over all rows at once."""
    of_rows = [losses_of(p, row, shape, goal) for row in rows]
    if goal.normalize == "fixed":
        return mean([loss for losses in of_rows for loss in losses], len(rows) * goal.max_length)
    if goal.normalize == "token":
        return mean([loss for losses in of_rows for loss in losses])
    if goal.normalize == "sequence":
        return mean([mean(losses) for losses in of_rows if losses])
    prompts: dict[int, list[Tensor]] = {}
    for row, losses in zip(rows, of_rows, strict=True):
        prompts.setdefault(row.prompt, []).extend(losses)
    return mean([mean(losses) for losses in prompts.values() if losses])


def train(
    start: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    rows: Sequence[Sequence64],
    shape: Shape,
    goal: Goal,
    adam: Adam,
    steps: int,
) -> Training:
    """`steps` steps of AdamW with a constant rate on the same rows; the `frozen` parameters stay as they are."""
    p = {name: value.double().clone().requires_grad_() for name, value in start.items() if not name.endswith(BIAS)}
    biases = {name: value.double().clone() for name, value in start.items() if name.endswith(BIAS)}
    fixed = {name: value.double() for name, value in frozen.items()} | biases
    first = {name: torch.zeros_like(value) for name, value in p.items()}
    second = {name: torch.zeros_like(value) for name, value in p.items()}
    done = Training()
    for step in range(1, steps + 1):
        shape.loads.clear()
        loss = batch_loss({**fixed, **p}, rows, shape, goal)
        # An expert that no token chose has a gradient of zeros.
        grads = torch.autograd.grad(loss, list(p.values()), allow_unused=True, materialize_grads=True)
        slopes = dict(zip(p, grads, strict=True))
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
            balanced(biases, shape)
    done.parameters = {name: value.detach() for name, value in p.items()} | biases
    return done
