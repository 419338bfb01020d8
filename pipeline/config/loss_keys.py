"""The keys of the policy loss, its advantages and the critic: `loss.*` and `critic.*`.

The names of losses and estimators are those of the functions in `pipeline.algorithms`.
"""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from pipeline.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from pipeline.algorithms.kl_estimators import KL_ESTIMATORS
from pipeline.algorithms.policy_losses import POLICY_LOSSES
from pipeline.config.value_types import Fraction, NotNegative, Section

# A type checker reads no list of a running program; pydantic does, and names all values in its errors.
if TYPE_CHECKING:
    LossName: TypeAlias = str
    EstimatorName: TypeAlias = str
    KlEstimatorName: TypeAlias = str
else:
    LossName = Literal[tuple(POLICY_LOSSES)]
    EstimatorName = Literal[tuple(ADVANTAGE_ESTIMATORS)]
    KlEstimatorName = Literal[tuple(KL_ESTIMATORS)]


class LossConfig(Section):
    """The policy loss and its advantages."""

    name: LossName = Field(description="The policy loss.")
    advantage_estimator: EstimatorName = Field(
        "group_std",
        description="Estimator of the advantages. "
        + "; ".join(f"`{name}`: {entry.description}" for name, entry in ADVANTAGE_ESTIMATORS.items())
        + ".",
    )
    old_logprobs: Literal["sampler", "recompute"] = Field(
        "recompute",
        description="Policy in the denominator of the ratio. `sampler`: the policy that sampled; `recompute`: the "
        "trainer's policy at the start of the step, whose log-probabilities are recomputed if a batch takes several "
        "optimizer steps.",
    )
    tis: Literal["none", "truncate", "mask"] = Field(
        "mask",
        description="Importance-sampling correction of each token, by the ratio of the recomputed policy to the "
        "sampling policy. `mask`: weight by the ratio, and drop tokens outside of tis_low … tis_cap; `truncate`: "
        "weight by the ratio, at most tis_cap; `none`: no correction, as needed with loss.old_logprobs=sampler.",
    )
    tis_cap: Annotated[float, Field(gt=1)] = Field(2.0, description="Largest ratio of the correction.")
    tis_low: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="Smallest ratio that is not dropped.")
    sequence_mask: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Drop samples whose ratio of the recomputed policy to the sampling policy, the geometric mean over "
        "their tokens, is outside of 1 / (1 + sequence_mask) … 1 + sequence_mask, such as 0.01; 0: drop none.",
    )
    clip_low: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="The ratio is clipped from below at 1 − clip_low."
    )
    clip_high: Annotated[float, Field(ge=0)] = Field(
        0.2, description="The ratio is clipped from above at 1 + clip_high."
    )
    normalize: Literal["token", "sequence", "prompt", "fixed"] = Field(
        "token", description="Unit of the mean in each step's loss; `fixed` divides by samples × model.max_length."
    )
    kl: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Weight of the KL divergence from the reference model, a frozen copy of the policy, or from the "
        "model at teacher.url; 0: none.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Use the KL as a term of the loss, or subtract it from each token's reward."
    )
    reference_every: NotNegative = Field(
        0, description="Steps between updates of the reference model to the current policy; 0: never."
    )
    kl_estimator: KlEstimatorName = Field("k3", description="Estimator of the KL (Schulman 2020).")
    entropy: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the entropy bonus.")
    ratio_cap: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Truncation of the importance weight (truncated importance sampling)."
    )
    beta: Annotated[float, Field(ge=0)] = Field(
        0.05, description="Weight of the squared distance from the sampling policy."
    )
    gamma: Fraction = Field(1.0, description="Discount of a reward for each sampled token (γ).")
    gae_lambda: Fraction = Field(0.95, description="Decay of the temporal differences in GAE (λ).")

    @property
    def estimator(self) -> AdvantageEstimator:
        """The entry of `advantage_estimator`."""
        return ADVANTAGE_ESTIMATORS[self.advantage_estimator]


class CriticConfig(Section):
    """The value model, if the advantage estimator has one; it starts as the policy with a new head for one number."""

    lr: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="The critic's learning rate; its optimizer otherwise has the policy's settings. 0: 1e-5 for a "
        "pretrained model, 1e-4 for random weights.",
    )
    clip: Annotated[float, Field(ge=0)] = Field(
        0.2, description="Largest change of a value in one step before its loss has no gradient; 0: no limit."
    )
