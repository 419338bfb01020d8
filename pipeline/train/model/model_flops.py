"""The floating-point operations of a model's forward and backward pass.

Owns the one formula by which the trainer, its scripts and its metrics count FLOPs (docs/metrics.md states it). Counted
are matrix products and attention between tokens, as the arithmetic needs them: no recomputation, no padding, no masked
pair of tokens, no expert that a token is not routed to, no gradient of a frozen weight. Pure.

    model.flops.of_rows([(4096, 0), (4096, 512)], predicted=7000)   # the second row shares 512 tokens with the first
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.train.model import attention_shapes as shapes

_PASSES = 3
"""Attention's backward pass has twice the products of its forward pass: the gradients of both factors of each."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward and backward pass.

    Attributes:
        token: for each token that the layers compute.
        prediction: for each token that the head predicts.
        pairs: for each pair of a query and a key that it attends to, by the window of the layers (0: none), summed over
            the layers with this window.
    """

    token: float = 0.0
    prediction: float = 0.0
    pairs: Mapping[int, float] = field(default_factory=dict)

    def of_rows(self, rows: Iterable[tuple[int, int]], predicted: int) -> float:
        """Operations for rows of (length, tokens shared with another row), and a head that predicts `predicted` tokens.

        A shared token is computed once: its row counts only the later tokens, which attend to all of the row.
        """
        rows = list(rows)
        computed = sum(length - shared for length, shared in rows)
        attention = sum(
            cost * sum(causal_pairs(length, window) - causal_pairs(shared, window) for length, shared in rows)
            for window, cost in self.pairs.items()
        )
        return self.token * computed + self.prediction * predicted + attention


def causal_pairs(length: int, window: int = 0) -> int:
    """Pairs (query, key) of a row: token i attends to the tokens i − window < j ≤ i; 0: to all j ≤ i."""
    reach = min(length, window or length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def attention_pairs(settings: Any, layers: int) -> dict[int, float]:
    """`ModelFlops.pairs` of a text config: 2 operations for each number of query and value, of each head, 3 passes.

    0 for layers without attention between tokens; their recurrences are not counted.
    """
    width = 2 * _PASSES * shapes.heads(settings) * sum(shapes.query_and_value_dims(settings))
    costs: dict[int, float] = {}
    for kind in shapes.layer_kinds(settings, layers):
        if shapes.attends(kind):
            reach = shapes.window(settings) if kind in shapes.WINDOWED else 0
            costs[reach] = costs.get(reach, 0.0) + width
    return costs
