"""Reinforcement learning from groups that the actor sampled with weights up to `max_lag` steps old.

This file is the loop around the algorithm of `update`: take a batch of groups, train it, send the weights to the
servers, evaluate now and then. It knows nothing of ranks (`dispatch`), of how groups come (`batches`), nor of how
weights travel (`publisher`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.config import RunConfig
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.evaluations import Evaluations
from pipeline.train.loop.group_batches import GroupBatches
from pipeline.train.loop.logprob_agreement import Agreement
from pipeline.train.loop.policy_update import PolicyUpdate
from pipeline.train.loop.step_metrics import EqualRewards, NonFiniteGuard
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.train.train_jobs import RlJob
from pipeline.transport.group_advantages import FILTERED, has_zero_variance
from pipeline.transport.ledger import TRAINED
from pipeline.transport.sample_records import PreparedGroup, Sample, mean_metrics
from pipeline.transport.staleness import is_fresh

FAILED, UNTRAINED = "failed: gradient not finite", "filtered: no token counts"
"""What becomes of the groups of a step that taught nothing."""


class ReinforcementLearning:
    """The `Algorithm` of an `RlJob`. The weight version is the number of its steps done."""

    def __init__(
        self,
        job: RlJob,
        config: RunConfig,
        dispatch: RankGroup,
        batches: GroupBatches,
        publisher: WeightPublisher,
        evaluations: Evaluations,
        warm_up: WarmUp,
    ) -> None:
        self.job = job
        self._config, self._batches = config, batches
        self._publisher, self._evaluations, self._warm_up = publisher, evaluations, warm_up
        self._update = PolicyUpdate(dispatch, config)
        self._skips, self._agreement, self._equal = NonFiniteGuard(), Agreement(), EqualRewards(config.loss)

    def begin(self, step: int) -> None:
        """Bring the servers to the weights of `step`, and measure them if no earlier attempt did.

        Only a fresh job waits for that: it says where RL starts from. The models are warmed up while servers start.
        """
        self._update.begin(self.job.optim, self.job.steps, step)
        self._publisher.start(step)
        if step < self.job.steps:
            self._update.warm_up(self._warm_up)
        self._publisher.wait_until_synced()
        self._batches.publish_progress(step)
        self._evaluations.request(step, self._evaluations.due(step))
        if step == 0:
            self._evaluations.wait()

    def step(self, step: int) -> Mapping[str, float]:
        started = time.monotonic()
        groups = self._batches.next(version=step)
        waited = time.monotonic() - started
        training = self._config.training
        oldest = step - training.max_lag
        rows = rows_of(groups, masked=training.masked_finish, oldest=oldest)
        self._update.measured = not self._agreement.known
        metrics = self._update.run(rows, step)
        about = batch_metrics(groups, step, oldest)
        self._agreement.check(metrics | about)
        if not self._config.teacher.url:  # a teacher's divergence teaches where rewards are alike
            self._equal.note([[sample.reward for sample in prepared.group.samples] for prepared in groups])
        self._batches.trained(step, self._outcome(metrics))
        timing = {"seconds/data": waited, "seconds/train": time.monotonic() - started - waited}
        aside = self._batches.counts
        counts = {
            "tokens/batch": float(sum(map(len, rows))),
            "set_aside": float(aside.total()),
            "groups/malformed": float(aside["malformed"]),
            "groups/stale": float(aside["stale"]),
            "groups/zero_variance": zero_variance(groups, dropped=aside[FILTERED]),
        }
        return metrics | about | timing | counts

    def after_step(self, done: int) -> Mapping[str, float]:
        """Tell the progress, send the new weights, and ask for an evaluation when it is time.

        Raises `TrainingError` when the last steps were all skipped: the model is lost.
        """
        self._skips.check()
        self._batches.publish_progress(done)
        metrics = self._publisher.wait_until_synced() | self._publisher.start(done)
        if due := self._evaluations.due(done):
            metrics |= self._publisher.wait_until_synced()
            self._evaluations.request(done, due)
        self._evaluations.collect()
        return metrics

    def end(self) -> None:
        """Bring every server to the final weights and measure them."""
        self._publisher.wait_until_synced()
        last = self.job.steps
        self._evaluations.request(last, self._evaluations.due(last, last=True))
        self._evaluations.wait()

    @property
    def is_checkpointable(self) -> bool:
        """See `PolicyUpdate.intact`."""
        return self._update.is_checkpointable

    def _outcome(self, metrics: Mapping[str, float]) -> str:
        if self._skips.note(metrics):
            return FAILED
        return TRAINED if metrics["optimizer_steps"] else UNTRAINED


def rows_of(groups: Sequence[PreparedGroup], masked: str | None = None, oldest: int = 0) -> list[TrainSequence]:
    """The rows of each sample, in order. No token counts of a sample that ended as `masked` says, nor any that was
    sampled by weights before version `oldest`."""
    rows = [
        TrainSequence(
            tokens=row.tokens,
            mask=np.zeros(len(row.tokens), np.bool_) if sample.finish == masked else is_fresh(row, oldest),
            advantages=advantage,
            sampler_logprobs=row.logprobs,
            prompt=prepared.group.position,
            episode=number,
        )
        for prepared in groups
        for number, (sample, advantage) in enumerate(zip(prepared.group.samples, prepared.advantages, strict=True))
        for row in sample.rows()
    ]
    references = (each for prepared in groups for each in prepared.reference_arrays())
    return [replace(row, reference=reference) for row, reference in zip(rows, references, strict=True)]


def batch_metrics(groups: Sequence[PreparedGroup], version: int, oldest: int = 0) -> dict[str, float]:
    """What a batch is like: reward, lengths, and its lag at `version`, where tokens of weights before `oldest` are
    masked."""
    samples = [sample for prepared in groups for sample in prepared.group.samples]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sum(np.count_nonzero(row.sampled) for row in sample.rows()) for sample in samples])
    abandoned = [seconds for prepared in groups for seconds in prepared.group.abandoned]
    kept, wasted = sum(sample.seconds for sample in samples), sum(abandoned)
    about = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "samples": float(len(samples)),
        "samples/cut": float(np.mean([sample.finish == "length" for sample in samples])),
        "completion_length/mean": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "groups/failed_samples": float(sum(len(prepared.group.failures) for prepared in groups)),
        "groups/abandoned_samples": float(len(abandoned)),
        "groups/abandoned_time": wasted / (kept + wasted) if wasted else 0.0,
    }
    return about | _lag_metrics(samples, version, oldest) | mean_metrics(samples)


def zero_variance(groups: Sequence[PreparedGroup], dropped: int) -> float:
    """The share of groups whose samples all have the same reward, among those of a batch and those that were `dropped`
    for it since the batch before."""
    alike = sum(has_zero_variance([sample.reward for sample in prepared.group.samples]) for prepared in groups)
    return (alike + dropped) / (len(groups) + dropped)


def _lag_metrics(samples: Sequence[Sample], version: int, oldest: int) -> dict[str, float]:
    """The lag of each sample's oldest token that is not masked, and how much is masked."""
    rows = [sample.rows() for sample in samples]
    sampled = sum(np.count_nonzero(row.sampled) for each in rows for row in each)
    left = [np.concatenate([row.versions[is_fresh(row, oldest)] for row in each]) for each in rows]
    lags = [version - versions.min() for versions in left if versions.size] or [0]
    return {
        "lag/mean": float(np.mean(lags)),
        "lag/max": float(max(lags)),
        "lag/masked": float(1 - sum(map(len, left)) / max(1, sampled)),
        "samples/masked": float(np.mean([not versions.size for versions in left])),
    }
