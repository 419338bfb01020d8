"""The trainer's arithmetic once more: one process, float64, one row and one token at a time.

Shares no code with `pipeline`: its own layers from the published architectures (`layers`), its own adapters and value
head, its own losses (`losses`), denominators and AdamW. Slow and plain on purpose; nothing is packed, padded, cut,
sharded or reduced.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.oracle.layers import BIAS, Shape, attention, experts_after, fed, normed
from tests.support.oracle.losses import Goal, Sequence64, mean, policy_losses, value_losses

Parameters = dict[str, Tensor]


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
    """What some steps did: the losses and the gradients before each step, and the parameters after the last."""

    losses: list[float] = field(default_factory=list)
    auxiliary: list[float] = field(default_factory=list)
    gradients: list[Parameters] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)


def balanced(p: Mapping[str, Tensor], shape: Shape) -> None:
    """Move each bias toward the experts that got fewer tokens than the mean of their layer."""
    for key, bias in p.items():
        if key.endswith(BIAS):
            counts = [shape.loads[key.removesuffix(f".gate.{BIAS}"), expert] for expert in range(len(bias))]
            for expert, count in enumerate(counts):
                lacking = sum(counts) - len(counts) * count
                bias[expert] += shape.bias_rate * ((lacking > 0) - (lacking < 0))


def states(p: Mapping[str, Tensor], tokens: Sequence[int], shape: Shape) -> Tensor:
    """The last hidden states after each prefix of one row: [T, E]."""
    x = p["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        y = normed(x, p[f"{name}.input_layernorm.weight"], shape.eps)
        x = x + attention(p, f"{name}.self_attn", y, shape, shape.window if layer % 2 == 0 else 0)
        y = normed(x, p[f"{name}.post_attention_layernorm.weight"], shape.eps)
        ends = range(1, len(tokens) + 1)
        chosen = [experts_after(tokens[:end], layer, shape.taken) if shape.replayed else None for end in ends]
        x = x + fed(p, f"{name}.mlp", y, shape, chosen)
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


def batch_loss(p: Mapping[str, Tensor], rows: Sequence[Sequence64], shape: Shape, goal: Goal) -> tuple[Tensor, Tensor]:
    """The mean of means that `goal.normalize` names, over all rows at once; and the auxiliary loss, the same mean of
    each row's own one, which counts as if each of the row's counted tokens had it."""
    of_rows, balances = [], []
    for row in rows:
        shape.balances.clear()
        of_rows.append(losses_of(p, row, shape, goal))
        balances.append(mean(shape.balances) if shape.balances else torch.zeros(()))
    repeated = [[balance] * len(losses) for losses, balance in zip(of_rows, balances, strict=True)]
    return averaged(of_rows, rows, goal), averaged(repeated, rows, goal)


def averaged(of_rows: Sequence[Sequence[Tensor]], rows: Sequence[Sequence64], goal: Goal) -> Tensor:
    """The mean of means of the numbers of each row's counted tokens."""
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
        loss, auxiliary = batch_loss({**fixed, **p}, rows, shape, goal)
        # An expert that no token chose has a gradient of zeros.
        grads = torch.autograd.grad(
            loss + goal.aux * auxiliary, list(p.values()), allow_unused=True, materialize_grads=True
        )
        slopes = dict(zip(p, grads, strict=True))
        norm = math.sqrt(sum(float((slope * slope).sum()) for slope in slopes.values()))
        done.losses.append(loss.item())
        done.auxiliary.append(auxiliary.item())
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
