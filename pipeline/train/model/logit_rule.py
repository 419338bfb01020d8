"""The rule by which a family turns hidden · weightᵀ into logits.

Owns the keys of configs that scale or cap logits. Must not know temperatures or log-probabilities.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "output_logit_soft_cap")


@dataclass(frozen=True)
class LogitRule:
    """logits = cap · tanh(scale · product / cap), without a cap scale · product, where product = hidden · weightᵀ.

    Attributes:
        scale: of Cohere (`logit_scale`), Granite (1 / `logits_scaling`) and Falcon-H1 (`lm_head_multiplier`).
        cap: of Gemma 2, 3n and 4 (`final_logit_softcapping`) and xLSTM; 0 without one.
    """

    scale: float = 1.0
    cap: float = 0.0

    def apply(self, product_NV: Tensor) -> Tensor:
        """The logits [N, V], in the memory of the product."""
        logits_NV = product_NV if self.scale == 1 else product_NV.mul_(self.scale)
        return logits_NV.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits_NV

    def slope(self, logits_NV: Tensor) -> Tensor:
        """∂logits/∂product [N, V] for the logits, in their memory: scale · (1 − (logits / cap)²). Only with a cap;
        otherwise it is `scale`."""
        return logits_NV.div_(self.cap).square_().neg_().add_(1).mul_(self.scale)


PLAIN = LogitRule()


def logit_rule(config: Any) -> LogitRule:
    """The rule of a transformers text config, by the keys of all families that have one."""
    factors = [_number(config, key) for key in _FACTORS] + [1 / _number(config, key) for key in _DIVISORS]
    scale = 1.0
    for factor in factors:
        scale *= factor
    return LogitRule(scale, next((float(cap) for key in _CAPS if (cap := getattr(config, key, None))), 0.0))


def _number(config: Any, key: str) -> float:
    value = getattr(config, key, None)
    return float(value) if isinstance(value, int | float) and value else 1.0
