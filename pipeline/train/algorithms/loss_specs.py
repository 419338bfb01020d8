"""What a model can be trained for.

Owns the names of the objectives beside `LossConfig`, and the levels of what is measured on the way. Cheap to pickle:
objectives travel to the ranks. Must not know torch.
"""

from dataclasses import dataclass
from typing import Final, Literal

from pipeline.config import LossConfig

MetricsLevel = Literal["none", "basic", "with_entropy"]
"""What is measured: only the loss; all that costs no further computation; the entropy of every distribution too."""


class SupervisedLoss:
    """Asks for the cross-entropy of the counted tokens (SFT); it has no settings."""

    name: Final = "sft"
    entropy: Final = 0.0


@dataclass(frozen=True)
class ValueLoss:
    """Asks a critic for values near the returns; `clip` as in `critic.clip`."""

    clip: float
    name: Final = "value"


PolicyLossSpec = LossConfig | SupervisedLoss
LossSpec = PolicyLossSpec | ValueLoss
SFT = SupervisedLoss()
