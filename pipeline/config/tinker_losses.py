"""The losses that clients of the API name: what each reads, and its settings.

Owns these tables, the alternatives to each loss that is not served, and the record of a choice. Cheap to import and to
pickle; the formulas are in `pipeline.train.algorithms.summed_losses`.
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
"""What each loss reads of every token beside its log-probability."""
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
"""Losses that the SDK has a name for and that are refused, with what to do instead."""


@dataclass(frozen=True)
class TokenSum:
    """A loss by its name, with all its settings; cheap to pickle."""

    name: str
    settings: Mapping[str, float]
