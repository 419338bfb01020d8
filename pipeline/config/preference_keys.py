"""The keys of training from preference pairs, `preference.*`.

The names of the losses are those of the functions in `pipeline.algorithms.preference_losses`.
"""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from pipeline.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from pipeline.config.value_types import NotNegative, Positive, Rate, Section

# A type checker reads no list of a running program; pydantic does, and names all values in its errors.
if TYPE_CHECKING:
    PreferenceLossName: TypeAlias = str
else:
    PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


class PreferenceConfig(Section):
    """Training from the preference pairs of `data.path`, instead of SFT and RL. Without steps and epochs there is
    none."""

    steps: NotNegative = Field(0, description="Optimizer steps of preference training.")
    epochs: Annotated[float, Field(ge=0)] = Field(
        0, description="Instead of steps: passes over the pairs of data.path."
    )
    batch: Positive = Field(32, description="Pairs in each step; with `loss=kto` single completions.")
    lr: Rate = Field(1e-6, description="Learning rate of preference training.")
    loss: PreferenceLossName = Field(
        "sigmoid",
        description="Loss of a pair. `sigmoid`: DPO; `ipo`: IPO; `simpo`: SimPO, which needs no reference model; "
        "`bradley_terry`: a reward model, with a head for one number in place of the language-model head; `kto`: KTO, "
        "of single completions with a label, or of both completions of pairs.",
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        0.1, description="Factor of the difference of two completions' log-probabilities (β)."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Probability that a pair's label is wrong (conservative DPO)."
    )
    desirable_weight: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Weight of the loss of desirable completions (λ_D of KTO)."
    )
    undesirable_weight: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Weight of the loss of undesirable completions (λ_U of KTO)."
    )
    margin: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Required difference of the scores (γ of SimPO, which suggests 0.5 with beta=2)."
    )

    @property
    def formula(self) -> PreferenceLoss:
        """The entry of `loss`."""
        return PREFERENCE_LOSSES[self.loss]
