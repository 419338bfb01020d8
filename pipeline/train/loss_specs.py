"""Loss specifications: the objective of a model, and the level of its metrics.

`LossConfig` specifies the losses of RL; this module adds the supervised loss, the critic's and a reward model's. Cheap
to pickle, because the controller sends specifications to the ranks. Must not know torch.
"""

from dataclasses import dataclass
from typing import Final, Literal

from pipeline.config import LossConfig

MetricsLevel = Literal["none", "basic", "with_entropy"]
"""Metrics of a loss: `none` the loss only; `basic` all without further computation; `with_entropy` the entropy too."""


class SupervisedLoss:
    """Cross-entropy of the counted tokens (SFT), without settings."""

    name: Final = "sft"
    entropy: Final = 0.0


@dataclass(frozen=True)
class ValueLoss:
    """Squared error of a critic's values against the returns; `clip` is `critic.clip`."""

    clip: float
    name: Final = "value"


class ScoreLoss:
    """The weighted sum of a reward model's scores, without settings. The weights are the derivatives of a loss of
    pairs."""

    name: Final = "score"


PolicyLossSpec = LossConfig | SupervisedLoss
ValueLossSpec = ValueLoss | ScoreLoss
LossSpec = PolicyLossSpec | ValueLossSpec
SFT = SupervisedLoss()
SCORE = ScoreLoss()
