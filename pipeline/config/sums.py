"""The losses that clients of the API name: what each reads, and its settings.

Owns three tables and the record of a choice. Cheap to import and to pickle; the formulas are in `pipeline.losses.sums`.
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
}
"""What each loss reads of every token beside its log-probability."""
SETTINGS: Final[Mapping[str, Mapping[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
"""The settings of each loss, with what they are when the client does not say."""


@dataclass(frozen=True)
class TokenSum:
    """A loss by its name, with all its settings; cheap to pickle."""

    name: str
    settings: Mapping[str, float]
