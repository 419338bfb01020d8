"""Losses of preferences with their gradients, and the list of them.

Owns the formulas and `PREFERENCE_LOSSES`. All except KTO compare two numbers of a pair: the score of its chosen
completion and that of its rejected one. Each function maps the difference `d` of the scores to the loss of each pair
and its derivative with respect to `d`, all float64[P]. Its keyword-only parameters are the keys of `preference.*` that
it reads. An entry also states how a score follows from the outputs of the models. docs/preferences.md has the table.

The derivative is explicit, because a loss of pairs is not a sum over tokens: the controller computes it from the
log-probabilities of whole completions, and the ranks train each completion with its factor. The completions of a pair
may therefore be in different micro-batches, or on different ranks.

A new loss is a decorated function:

    @preference_loss("hinge", has_reference=True)
    def hinge(difference_P: Floats, *, beta: float) -> PairTerms:
        return np.maximum(0, 1 - beta * difference_P), np.where(beta * difference_P < 1, -beta, 0.0)

The configuration takes its values from this list, and must not load numpy, so functions import it. Must not know rows,
models or ranks.

Notation: P pairs, N completions with a label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from pipeline.algorithms.key_parameters import key_parameters, key_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
Labels: TypeAlias = "NDArray[np.bool_]"
PairTerms: TypeAlias = "tuple[Floats, Floats]"
"""The loss of each pair, and its derivative with respect to the difference of the scores."""
F = TypeVar("F", bound=Callable[..., PairTerms])


@dataclass(frozen=True)
class PreferenceLoss:
    """An entry of `PREFERENCE_LOSSES`.

    Attributes:
        function: the formula; its positional parameter is the difference of the scores.
        keys: the keys of `preference.*` that it reads.
        has_reference: whether the score of a completion is its log-probability relative to the reference model's.
        is_averaged: whether this log-probability is a mean over the completion's tokens instead of their sum.
        is_reward_model: whether the scores are the values of a scalar head instead of log-probabilities.
        is_labeled: whether it reads single completions with a label instead of pairs; its positional parameters are the
            scores, the labels and the estimate of the KL, and its loss and derivative are of each completion.
    """

    function: Callable[..., PairTerms]
    keys: tuple[str, ...]
    has_reference: bool = False
    is_averaged: bool = False
    is_reward_model: bool = False
    is_labeled: bool = False

    def terms(self, difference_P: Floats, preference: object) -> PairTerms:
        """The loss of each pair and its derivative, [P]; `preference` is the `PreferenceConfig`."""
        return self.function(difference_P, **key_values(self.keys, preference))

    def labeled_terms(self, score_N: Floats, label_N: Labels, kl: float, preference: object) -> PairTerms:
        """The loss of each labeled completion and its derivative with respect to the score, [N]."""
        return self.function(score_N, label_N, kl, **key_values(self.keys, preference))


PREFERENCE_LOSSES: Final[dict[str, PreferenceLoss]] = {}
"""Every value of `preference.loss`, with its formula."""


def preference_loss(
    name: str,
    *,
    has_reference: bool = False,
    is_averaged: bool = False,
    is_reward_model: bool = False,
    is_labeled: bool = False,
) -> Callable[[F], F]:
    """Add the decorated function to `PREFERENCE_LOSSES`; see `PreferenceLoss`."""

    def register(function: F) -> F:
        keys = key_parameters(function)
        flags = (has_reference, is_averaged, is_reward_model, is_labeled)
        PREFERENCE_LOSSES[name] = PreferenceLoss(function, keys, *flags)
        return function

    return register


@preference_loss("sigmoid", has_reference=True)
def sigmoid(difference_P: Floats, *, beta: float, label_smoothing: float) -> PairTerms:
    """−(1 − ε) · log σ(βd) − ε · log σ(−βd), with ε = `label_smoothing`: DPO (Rafailov et al. 2023, arXiv 2305.18290);
    with ε > 0 conservative DPO (Mitchell 2023)."""
    return _logistic(beta * difference_P, beta, label_smoothing)


@preference_loss("ipo", has_reference=True, is_averaged=True)
def ipo(difference_P: Floats, *, beta: float) -> PairTerms:
    """(d − 1 / 2β)²: IPO (Azar et al. 2023, arXiv 2310.12036, equation 17, whose τ is β).

    The log-probabilities are means over tokens, as in TRL: the target 1 / 2β of a sum would depend on the length.
    """
    error_P = difference_P - 1 / (2 * beta)
    return error_P**2, 2 * error_P


@preference_loss("simpo", is_averaged=True)
def simpo(difference_P: Floats, *, beta: float, margin: float, label_smoothing: float) -> PairTerms:
    """−(1 − ε) · log σ(βd − γ) − ε · log σ(γ − βd), with γ = `margin`: SimPO (Meng et al. 2024, arXiv 2405.14734)."""
    return _logistic(beta * difference_P - margin, beta, label_smoothing)


@preference_loss("bradley_terry", is_reward_model=True)
def bradley_terry(difference_P: Floats, *, margin: float) -> PairTerms:
    """−log σ(d − m), with m = `margin`: the likelihood of the preference under the reward model (Bradley and Terry
    1952; Ouyang et al. 2022, arXiv 2203.02155)."""
    return _logistic(difference_P - margin, 1.0, 0.0)


@preference_loss("kto", has_reference=True, is_labeled=True)
def kto(
    score_N: Floats,
    label_N: Labels,
    kl: float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PairTerms:
    """λ_D · (1 − σ(β(s − z))) of a desirable completion, λ_U · (1 − σ(β(z − s))) of an undesirable one, with
    z = max(0, `kl`): KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equation 7). No gradient passes through z."""
    import numpy as np

    sign_N = np.where(label_N, 1.0, -1.0)
    weight_N = np.where(label_N, desirable_weight, undesirable_weight)
    logit_N = sign_N * beta * (score_N - max(0.0, kl))
    # d/ds (1 − σ(x)) = −σ(x) · σ(−x) · dx/ds
    slope_N = -sign_N * beta * _sigmoid(logit_N) * _sigmoid(-logit_N)
    return weight_N * _sigmoid(-logit_N), weight_N * slope_N


def _logistic(logit_P: Floats, slope: float, smoothing: float) -> PairTerms:
    """The cross-entropy of σ(logit) with the label 1 − `smoothing`; `slope` is the derivative of the logit."""
    import numpy as np

    # −log σ(x) = log(1 + e^−x); `logaddexp` is finite for every finite x.
    loss_P = (1 - smoothing) * np.logaddexp(0, -logit_P) + smoothing * np.logaddexp(0, logit_P)
    # d/dx = −(1 − ε) · σ(−x) + ε · σ(x) = σ(x) − (1 − ε)
    return loss_P, slope * (smoothing * _sigmoid(logit_P) - (1 - smoothing) * _sigmoid(-logit_P))


def _sigmoid(x_P: Floats) -> Floats:
    """1 / (1 + e^−x), without an overflow of e^−x."""
    import numpy as np

    return np.asarray(np.exp(-np.logaddexp(0, -x_P)))
