"""The layers of the oracle's models, from the published architectures: one row, one head, one token at a time.

Which family a layer is of shows in the names of its parameters. Shares no code with `pipeline`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

BIAS = "e_score_correction_bias"
"""The bias of a router, which has no gradient."""


@dataclass(frozen=True)
class Shape:
    """What the forward needs to know of the architecture; `scale` is alpha / rank of the adapters, `taken` the experts
    of a token in a mixture. Of GLM-4.5 and DeepSeek-V3, `rotary` is the part of a head that is rotated, `teams` the
    groups of experts of which a token goes to the best `chosen_teams`, `routed` the factor of what experts say, and
    `bias_rate` how far their bias moves at a step. Of DeepSeek-V3, `latent` are the numbers from which keys and values
    are made, and `turning` those of a head that are rotated. Of gpt-oss, every second layer sees `window` tokens. With
    `replayed`, `experts_after` chooses in place of routers. `loads` counts the tokens of each expert, by the layer's
    name and its number; `balances` has, of each layer of experts that a row went through, experts × Σ (share of the
    row's tokens at an expert) · (its likelihood)."""

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
    chosen_teams: int = 1
    routed: float = 1.0
    bias_rate: float = 0.0
    latent: int = 0
    turning: int = 0
    window: int = 0
    replayed: bool = False
    loads: Counter[tuple[str, int]] = field(default_factory=Counter, compare=False)
    balances: list[Tensor] = field(default_factory=list, compare=False)


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
    """x [T, in] by the layer's matrix, to which an adapter adds alpha / rank · B A, and its bias."""
    matrix = p[f"{name}.weight"]
    if f"{name}.lora_A.weight" in p:
        matrix = matrix + shape.scale * p[f"{name}.lora_B.weight"] @ p[f"{name}.lora_A.weight"]
    return x @ matrix.T + p.get(f"{name}.bias", 0.0)


def attention(p: Mapping[str, Tensor], prefix: str, x: Tensor, shape: Shape, window: int) -> Tensor:
    """x: [T, E] of one row; each token sees itself and those before it, `window` of them if it is not 0."""
    length = len(x)
    query, key, value = (latent if f"{prefix}.kv_b_proj.weight" in p else projected)(p, prefix, x, shape)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    sinks = p.get(f"{prefix}.sinks")
    heads = []
    for head in range(shape.heads):
        group = head * key.shape[1] // shape.heads
        scores = query[:, head] @ key[:, group].T / math.sqrt(query.shape[-1])
        likely = scores.masked_fill(hidden, -math.inf).exp()
        whole = likely.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[head].exp())
        heads.append(likely / whole @ value[:, group])
    return linear(p, f"{prefix}.o_proj", torch.cat(heads, -1), shape)


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values: [T, heads or groups, D] each."""


def projected(p: Mapping[str, Tensor], prefix: str, x: Tensor, shape: Shape) -> Heads:
    parts = []
    for name, heads in (("q", shape.heads), ("k", shape.groups), ("v", shape.groups)):
        part = linear(p, f"{prefix}.{name}_proj", x, shape).view(len(x), heads, shape.size)
        if f"{prefix}.{name}_norm.weight" in p:
            part = normed(part, p[f"{prefix}.{name}_norm.weight"], shape.eps)
        parts.append(part if name == "v" else turned(part, shape))
    return parts[0], parts[1], parts[2]


def latent(p: Mapping[str, Tensor], prefix: str, x: Tensor, shape: Shape) -> Heads:
    """As DeepSeek-V3 has it: queries by way of few numbers, keys and values of all heads from other few, and one part
    of a key, which alone is turned, for all heads. Pairs of neighbors (2i, 2i + 1) are turned."""
    few = normed(linear(p, f"{prefix}.q_a_proj", x, shape), p[f"{prefix}.q_a_layernorm.weight"], shape.eps)
    query = linear(p, f"{prefix}.q_b_proj", few, shape).view(len(x), shape.heads, -1)
    whole = linear(p, f"{prefix}.kv_a_proj_with_mqa", x, shape)
    few = normed(whole[:, : shape.latent], p[f"{prefix}.kv_a_layernorm.weight"], shape.eps)
    both = linear(p, f"{prefix}.kv_b_proj", few, shape).view(len(x), shape.heads, -1)
    plain = query.shape[-1] - shape.turning
    shared = neighbors(whole[:, None, shape.latent :], shape).expand(-1, shape.heads, -1)
    turning = neighbors(query[..., plain:], shape)
    return torch.cat([query[..., :plain], turning], -1), torch.cat([both[..., :plain], shared], -1), both[..., plain:]


def neighbors(x: Tensor, shape: Shape) -> Tensor:
    """x [T, heads, D], pairs of neighbors turned; afterwards the first of all pairs come before the second."""
    return rotated(torch.cat([x[..., 0::2], x[..., 1::2]], -1), shape.theta)


def multiplied(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape) -> Tensor:
    """y [..., E] through the two inner matrices and the outer one of a layer, or of an expert."""
    gate, up = linear(p, f"{name}.gate_proj", y, shape), linear(p, f"{name}.up_proj", y, shape)
    return linear(p, f"{name}.down_proj", gate * torch.sigmoid(gate) * up, shape)


Choices = Sequence[list[int] | None]
"""The experts of each token that are replayed; None: those that the router likes best."""


def experts_after(tokens: Sequence[int], layer: int, taken: int) -> list[int]:
    """What a server chose for the last of these tokens: any of the first four experts, whatever the weights are. Rows
    that begin alike have the same experts there."""
    return Random(f"{layer} {list(tokens)}").sample(range(4), taken)


def fed(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape, replayed: Choices) -> Tensor:
    """y [T, E] through a layer's matrices, or through experts."""
    if f"{name}.gate.{BIAS}" in p:
        return routed(p, name, y, shape, replayed)
    if f"{name}.router.weight" in p:
        return bounded(p, name, y, shape, replayed)
    if f"{name}.gate.weight" in p:
        return mixed(p, name, y, shape, replayed)
    return multiplied(p, name, y, shape)


def note_balance(shape: Shape, logits: Tensor, chosen: list[list[int]]) -> None:
    """Keep the layer's term of the auxiliary loss, from logits [T, experts] and the chosen experts of each token."""
    tokens, experts = logits.shape
    likely = logits.softmax(-1)
    terms = [
        sum(expert in of_token for of_token in chosen) / tokens * likely[:, expert].mean() for expert in range(experts)
    ]
    shape.balances.append(experts * torch.stack(terms).sum())


def mixed(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape, replayed: Choices) -> Tensor:
    """y [T, E], each token through the experts that its router likes best, weighted by how much it likes them."""
    logits = linear(p, f"{name}.gate", y, shape)
    tokens, chosen = [], []
    for token, of_token, fixed in zip(y, logits.softmax(-1), replayed, strict=True):
        best = fixed or best_of(of_token.tolist(), shape.taken)
        chosen.append(best)
        parts = [of_token[expert] * multiplied(p, f"{name}.experts.{expert}", token, shape) for expert in best]
        tokens.append(torch.stack(parts).sum(0) / of_token[best].sum())
    note_balance(shape, logits, chosen)
    return torch.stack(tokens)


def bounded(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape, replayed: Choices) -> Tensor:
    """y [T, E] as gpt-oss has it: a softmax over the best logits alone; experts with biases, whose gate and up are
    columns that take turns, both of them at most 7."""
    experts, logits = f"{name}.experts", linear(p, f"{name}.router", y, shape)
    tokens, chosen = [], []
    for token, of_token, fixed in zip(y, logits, replayed, strict=True):
        best = fixed or best_of(of_token.tolist(), shape.taken)
        chosen.append(best)
        parts = []
        for expert in best:
            inner = stacked(p, experts, expert, "gate_up_proj", token, shape)
            gate, up = inner[0::2].clamp(max=7), inner[1::2].clamp(-7, 7)
            outer = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            parts.append(stacked(p, experts, expert, "down_proj", outer, shape))
        tokens.append(sum(weight * part for weight, part in zip(of_token[best].softmax(-1), parts, strict=True)))
    note_balance(shape, logits, chosen)
    return torch.stack(tokens)


def stacked(p: Mapping[str, Tensor], experts: str, expert: int, name: str, x: Tensor, shape: Shape) -> Tensor:
    """x [in] by an expert's matrix [in, out] of a stack, to which an adapter adds, and its bias."""
    matrix, adapter = p[f"{experts}.{name}"][expert], f"{experts}.{expert}.{name}"
    if f"{adapter}.lora_A.weight" in p:
        matrix = matrix + shape.scale * (p[f"{adapter}.lora_B.weight"] @ p[f"{adapter}.lora_A.weight"]).T
    return x @ matrix + p[f"{experts}.{name}_bias"][expert]


def routed(p: Mapping[str, Tensor], name: str, y: Tensor, shape: Shape, replayed: Choices) -> Tensor:
    """y [T, E] as GLM-4.5 and DeepSeek-V3 have it: experts are chosen by sigmoid scores plus a bias, in the groups of
    experts whose two best are best; weighted by the scores without it; beside them, an expert that every token goes
    to."""
    bias, logits = p[f"{name}.gate.{BIAS}"], linear(p, f"{name}.gate", y, shape)
    tokens, chosen = [], []
    for token, scores, fixed in zip(y, logits.sigmoid(), replayed, strict=True):
        likes = [score + extra for score, extra in zip(scores.tolist(), bias.tolist(), strict=True)]
        size = len(likes) // shape.teams
        teams = [range(first, first + size) for first in range(0, len(likes), size)]
        of_teams = [sum(sorted((likes[expert] for expert in team), reverse=True)[:2]) for team in teams]
        allowed = [expert for team in best_of(of_teams, shape.chosen_teams) for expert in teams[team]]
        best = fixed or sorted(allowed, key=lambda expert: -likes[expert])[: shape.taken]
        shape.loads.update((name, expert) for expert in best)
        chosen.append(best)
        parts = [scores[expert] * multiplied(p, f"{name}.experts.{expert}", token, shape) for expert in best]
        tokens.append(shape.routed * torch.stack(parts).sum(0) / scores[best].sum())
    note_balance(shape, logits, chosen)
    return torch.stack(tokens) + multiplied(p, f"{name}.shared_experts", y, shape)


def best_of(values: list[float], count: int) -> list[int]:
    """Where the largest values are."""
    return sorted(range(len(values)), key=lambda index: -values[index])[:count]
