"""Preference training: one optimizer step on a batch of pairs per step.

Owns the step, independent of ranks (`dispatch`) and of the source of pairs:

    1. Compute the log-probabilities of both completions of each pair, by the policy and, if the loss has one, by the
       reference model; for a reward model the values of both texts; for KTO those of labeled completions and of
       mismatched rows (`pipeline.train.loop.labeled_terms`).
    2. Compute the loss of each pair, and its derivative with respect to each completion's output
       (`pipeline.algorithms.preference_losses`).
    3. Train each completion with its derivative as its weight. The sum over micro-batches and ranks of weight × output
       has the gradient of the loss, since the policy has not moved since the forward pass.
    4. Take the optimizer step.

The first forward pass of the policy is repeated in the third part, a quarter of the policy's computation. In return a
pair may be split over micro-batches and ranks, and rows of any length are packed as in SFT. The weights may be
negative: the rejected completion gets less likely.

Promises that the pairs of step s depend on s alone; and that a new job starts with a new optimizer and a reference
model that is a copy of the policy. Must not know ranks, checkpoints or files.

    training.begin(done)                    # once, with the number of completed steps
    metrics = training.step(step)           # step = done, done + 1, …
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from pipeline.algorithms.preference_losses import Floats
from pipeline.config import PreferenceConfig, RunConfig
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.model_saving import expect_save
from pipeline.train.controller.rank_group import Answers, RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.eval_loss import EvalLoss
from pipeline.train.loop.group_batches import Pulse
from pipeline.train.loop.labeled_terms import labeled_metrics, score_labeled
from pipeline.train.loop.overflow_retries import train_batch
from pipeline.train.loop.sft import Demonstrate
from pipeline.train.loop.step_metrics import NonFiniteGuard
from pipeline.train.loss_specs import SCORE, SFT, LossSpec
from pipeline.train.train_jobs import PreferenceJob
from pipeline.train.worker_spec import models_of


@dataclass(frozen=True)
class PairOutputs:
    """The models' outputs for a batch of pairs, float64[P] each.

    Attributes:
        chosen, rejected: the policy's output: the log-probability of the completion in nats, a mean over its tokens if
            the loss `is_averaged`; of a reward model the score of the text.
        reference_chosen, reference_rejected: the same of the reference model; 0 without one.
        chosen_tokens, rejected_tokens: counted tokens of the completions.
    """

    chosen: Floats
    rejected: Floats
    reference_chosen: Floats
    reference_rejected: Floats
    chosen_tokens: Floats
    rejected_tokens: Floats

    @property
    def difference(self) -> Floats:
        """Score of the chosen completion minus that of the rejected one, [P]."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


def pair_outputs(outputs: Mapping[str, Answers], batch: Batch, preference: PreferenceConfig) -> PairOutputs:
    """The outputs of the models for each completion, from those for each token; the rows of `batch` alternate between
    chosen and rejected."""
    formula = preference.formula
    tokens = np.array([row.counted for row in batch.rows], np.float64)

    def of_rows(name: str) -> Floats:
        if name not in outputs:
            return np.zeros(len(batch.rows))
        sums = np.array([values.sum(dtype=np.float64) for values in outputs[name]])
        return sums / tokens if formula.is_averaged else sums

    policy, reference = of_rows("policy"), of_rows("reference")
    return PairOutputs(policy[::2], policy[1::2], reference[::2], reference[1::2], tokens[::2], tokens[1::2])


def row_weights(slope_P: Floats, outputs: PairOutputs, preference: PreferenceConfig) -> list[float]:
    """The derivative of the mean loss with respect to each counted token's output, in the order of the rows.

    `slope_P` is the derivative of each pair's loss with respect to the difference of its scores.
    """
    chosen_P, rejected_P = slope_P / len(slope_P), -slope_P / len(slope_P)
    if preference.formula.is_averaged:  # the score is a mean, so a token has 1 / (tokens) of it
        chosen_P, rejected_P = chosen_P / outputs.chosen_tokens, rejected_P / outputs.rejected_tokens
    return [float(weight) for pair in zip(chosen_P, rejected_P, strict=True) for weight in pair]


def pair_metrics(outputs: PairOutputs, loss_P: Floats, preference: PreferenceConfig) -> dict[str, float]:
    """The metrics of docs/metrics.md for a batch of pairs."""
    formula = preference.formula
    scale = 1.0 if formula.is_reward_model else preference.beta
    chosen_P = scale * (outputs.chosen - outputs.reference_chosen)
    rejected_P = scale * (outputs.rejected - outputs.reference_rejected)
    metrics = {
        "loss": float(loss_P.mean()),
        "pairs": float(len(loss_P)),
        "accuracy": float((chosen_P > rejected_P).mean()),
        "margin": float((chosen_P - rejected_P).mean()),
        "reward/chosen": float(chosen_P.mean()),
        "reward/rejected": float(rejected_P.mean()),
    }
    if not formula.is_reward_model:
        metrics |= {
            "logprob/chosen": float(outputs.chosen.mean()),
            "logprob/rejected": float(outputs.rejected.mean()),
        }
    return metrics


class PreferenceTraining:
    """The `Algorithm` of a `PreferenceJob`: minimizes `preference.loss` of the pairs.

    Attributes:
        is_checkpointable: False during the optimizer step. If it fails on one rank, the ranks' parameters differ, which
            no checkpoint may contain.
    """

    def __init__(
        self,
        job: PreferenceJob,
        config: RunConfig,
        dispatch: RankGroup,
        pairs: Demonstrate,
        pulse: Pulse,
        held_out: EvalLoss | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        """`pairs` returns the rows of a number of pairs, each chosen row before its rejected one. `held_out` evaluates
        the model on the eval split. Without `warm_up` the first step compiles."""
        self.job, self._held_out, self._warm_up = job, held_out, warm_up
        self._config, self._preference = config, config.preference
        self._dispatch, self._pairs, self._pulse = dispatch, pairs, pulse
        self._skips = NonFiniteGuard()
        self.is_checkpointable = True

    def begin(self, step: int) -> None:
        if step == 0:
            self._dispatch.reset_optimizer("policy", self.job.optim, steps=self.job.steps)
            self._make_reference()
        if self._warm_up and step < self.job.steps:
            self._warm_up.run({"policy": self._linear_loss}, scored_models(self._preference))
        self._measure(step)

    def step(self, step: int) -> Mapping[str, float]:
        self._pulse()
        batch = Batch.of(self._pairs(step, self.job.batch))
        weights, measured = self._terms(batch)
        self._pulse()
        if not self._preference.formula.is_reward_model:
            weights = [-weight for weight in weights]  # the loss of SFT is the sum of weight × −logprob
        split = self._dispatch.cut(["policy"], replace(batch, weights=tuple(weights)))
        level = self._config.training.metrics
        metrics = train_batch(self._dispatch, "policy", split, self._linear_loss, level, self._stepping) | measured
        self._skips.note(metrics)
        size = {"tokens/batch": float(sum(batch.lengths)), "tokens/shared": float(split.saved_tokens)}
        return metrics | size | {"steps": float(self.job.steps)}

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """An optimizer step, after whose failure `is_checkpointable` stays False."""
        self.is_checkpointable = False
        yield
        self.is_checkpointable = True

    def after_step(self, done: int) -> Mapping[str, float]:
        """Evaluate if due. Raises `TrainingError` if the last steps were all skipped: the model has diverged."""
        self._skips.check()
        self._measure(done)
        return {}

    def end(self) -> None:
        """Evaluate the final model."""
        self._measure(self.job.steps, last=True)

    def _terms(self, batch: Batch) -> tuple[list[float], dict[str, float]]:
        """The derivative of the loss with respect to each counted token's output, by row, and the metrics."""
        preference = self._preference
        if preference.formula.is_labeled:
            labeled = score_labeled(self._dispatch, batch, self._config.model.max_length)
            _, slope_N = labeled.terms(preference)
            return [float(slope) / len(slope_N) for slope in slope_N], labeled_metrics([labeled], preference)
        outputs = score_pairs(self._dispatch, batch, preference)
        loss_P, slope_P = preference.formula.terms(outputs.difference, preference)
        return row_weights(slope_P, outputs, preference), pair_metrics(outputs, loss_P, preference)

    def _make_reference(self) -> None:
        """The reference model of a new job, a copy of the policy; for a resumed job the checkpoint has restored it."""
        specs = models_of(self._config, "preference", self.job.optim, self.job.steps)
        if "reference" in specs:
            self._dispatch.init_model("reference", specs["reference"])
            self._dispatch.copy_parameters("policy", "reference")
            expect_save(self._dispatch, ["reference"])

    @property
    def _linear_loss(self) -> LossSpec:
        """The loss whose gradient is that of the weighted outputs."""
        return SCORE if self._preference.formula.is_reward_model else SFT

    def _measure(self, step: int, *, last: bool = False) -> None:
        if self._held_out:
            self._held_out.at(step, last=last)


def scored_models(preference: PreferenceConfig) -> list[str]:
    """The models whose outputs the loss reads."""
    return ["policy", "reference"] if preference.formula.has_reference else ["policy"]


def score_pairs(dispatch: RankGroup, batch: Batch, preference: PreferenceConfig) -> PairOutputs:
    """Forward passes of the policy and the reference model on a batch of pairs."""
    outputs = dispatch.forward_models(scored_models(preference), batch)
    return pair_outputs(outputs, batch, preference)


class EvalPreferences(EvalLoss):
    """Measures the loss of preferences on the eval pairs; see `EvalLoss`. `batch` counts rows, two of each pair.
    Mismatched rows of labeled completions have at most `max_length` tokens."""

    def __init__(
        self, dispatch: RankGroup, preference: PreferenceConfig, max_length: int = 0, **settings: object
    ) -> None:
        super().__init__(dispatch, **settings)  # type: ignore[arg-type]
        self._preference, self._max_length = preference, max_length

    def _measure(self) -> dict[str, float]:
        """The metrics of a batch of all eval pairs or completions, below `eval/`."""
        if self._preference.formula.is_labeled:
            labeled = [score_labeled(self._dispatch, batch, self._max_length) for batch in self._batches()]
            return {f"eval/{name}": value for name, value in labeled_metrics(labeled, self._preference).items()}
        sums: dict[str, float] = {}
        for batch in self._batches():
            outputs = score_pairs(self._dispatch, batch, self._preference)
            loss_P, _ = self._preference.formula.terms(outputs.difference, self._preference)
            for name, value in pair_metrics(outputs, loss_P, self._preference).items():
                sums[name] = sums.get(name, 0.0) + value * len(loss_P)
        pairs = len(self._rows) / 2
        return {f"eval/{name}": value / pairs for name, value in sums.items() if name != "pairs"} | {
            "eval/pairs": pairs
        }
