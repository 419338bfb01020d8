"""The loss of labeled completions (KTO) for one batch: its inputs from the models, and its metrics.

Owns the estimate of the KL between the policy and the reference model, as in the paper (arXiv 2402.01306, section 4.2)
and TRL: each prompt of the batch gets the completion of the batch's previous row, and the estimate is the mean of
log π − log ref over these mismatched rows. It is a constant of the step; the loss clamps it at 0. A batch of one row
has no other completion, so its estimate is 0. Must not know ranks, checkpoints or files.

Notation: N completions of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.algorithms.preference_losses import Floats, Labels, PairTerms
from pipeline.config import PreferenceConfig
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import Answers, RankGroup

MODELS = ("policy", "reference")


@dataclass(frozen=True)
class LabeledOutputs:
    """The models' outputs for a batch of labeled completions.

    Attributes:
        policy, reference: float64[N], log-probability of each completion in nats.
        labels: bool[N], whether the completion is desirable.
        kl: the estimate of the KL in nats; negative by chance.
    """

    policy: Floats
    reference: Floats
    labels: Labels
    kl: float

    def terms(self, preference: PreferenceConfig) -> PairTerms:
        """The loss of each completion and its derivative with respect to its log-probability, [N]."""
        score_N = self.policy - self.reference
        return preference.formula.labeled_terms(score_N, self.labels, self.kl, preference)


def mismatched_rows(rows: Sequence[TrainSequence], max_length: int) -> list[TrainSequence]:
    """Each row's prompt, followed by the completion of the row before, cut at `max_length` tokens; empty for one row.

    A row's completion begins at its first counted token.
    """
    if len(rows) < 2:
        return []
    result = []
    for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        begin, first = int(np.argmax(row.mask)), int(np.argmax(other.mask))
        tokens = np.concatenate([row.tokens[:begin], other.tokens[first:]])[:max_length]
        mask = np.concatenate([row.mask[:begin], other.mask[first:]])[:max_length]
        result.append(replace(row, tokens=tokens, mask=mask))
    return result


def labeled_outputs(outputs: dict[str, Answers], rows: Sequence[TrainSequence]) -> LabeledOutputs:
    """The outputs for `rows` from the log-probabilities of each token, of these rows and then of the mismatched."""
    count = len(rows)
    policy, reference = (
        np.array([values.sum(dtype=np.float64) for values in outputs[name]], np.float64) for name in MODELS
    )
    mismatched = policy[count:] - reference[count:]
    kl = float(mismatched.mean()) if len(mismatched) else 0.0
    labels_N = np.array([row.label for row in rows], np.bool_)
    return LabeledOutputs(policy[:count], reference[:count], labels_N, kl)


def score_labeled(dispatch: RankGroup, batch: Batch, max_length: int) -> LabeledOutputs:
    """Forward passes of the policy and the reference model on a batch of completions, and on the mismatched rows."""
    every = [*batch.rows, *mismatched_rows(batch.rows, max_length)]
    outputs = dispatch.forward_models(list(MODELS), Batch.of(every))
    return labeled_outputs(dict(outputs), batch.rows)


def labeled_metrics(batches: Sequence[LabeledOutputs], preference: PreferenceConfig) -> dict[str, float]:
    """The metrics of docs/metrics.md over all completions of some batches. Means of one label are absent without it."""
    loss_N = np.concatenate([outputs.terms(preference)[0] for outputs in batches])
    labels_N = np.concatenate([outputs.labels for outputs in batches])
    policy_N = np.concatenate([outputs.policy for outputs in batches])
    score_N = policy_N - np.concatenate([outputs.reference for outputs in batches])
    kl_N = np.concatenate([np.full(len(outputs.labels), max(0.0, outputs.kl)) for outputs in batches])
    right_N = np.where(labels_N, score_N > kl_N, score_N < kl_N)
    metrics = {
        "loss": float(loss_N.mean()),
        "completions": float(len(loss_N)),
        "accuracy": float(right_N.mean()),
        "kl": float(kl_N.mean()),
    }
    for name, chosen_N in (("chosen", labels_N), ("rejected", ~labels_N)):
        if chosen_N.any():
            metrics[f"reward/{name}"] = float(preference.beta * score_N[chosen_N].mean())
            metrics[f"logprob/{name}"] = float(policy_N[chosen_N].mean())
    if labels_N.any() and not labels_N.all():
        metrics["margin"] = metrics["reward/chosen"] - metrics["reward/rejected"]
    return metrics
