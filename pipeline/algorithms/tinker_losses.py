"""The losses of the Tinker API: their inputs, their settings, and alternatives to unsupported ones.

Cheap to import and to pickle. The formulas are in `pipeline.algorithms.summed_losses`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

POLICY_COLUMNS: Final = ("logprobs", "advantages")
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": POLICY_COLUMNS,
    "ppo": POLICY_COLUMNS,
    "cispo": POLICY_COLUMNS,
    "dro": POLICY_COLUMNS,
    "gspo": (*POLICY_COLUMNS, "sequence_ratio_mask"),
}
"""The inputs of each loss per token, in addition to the policy's log-probability."""
SETTINGS: Final[Mapping[str, Mapping[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
}
"""The settings of each loss, with their defaults. Those of `gspo` are its paper's (Zheng et al. 2025), since Tinker's
pages name none."""
OTHER_LOSSES: Final = "loss_fn=importance_sampling, or ppo, cispo or gspo for samples of older weights"
NOT_SERVED: Final[Mapping[str, str]] = {
    "stable_reinforce": f"its formula is not public; take {OTHER_LOSSES}",
    "custom": "forward_backward_custom computes such a loss in the client",
}
"""Losses of the SDK that are refused, with an alternative."""


@dataclass(frozen=True)
class TokenSum:
    """A chosen loss with all its settings; cheap to pickle."""

    name: str
    settings: Mapping[str, float]
