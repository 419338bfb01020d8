"""Reinforcement learning from groups that the actor sampled with weights up to `max_lag` steps old.

This file is the loop around `policy_update`: take a batch of groups, train it, send the weights to the servers, request
evaluations. `pipeline.train.loop` draws the whole flow. Must not know ranks (`dispatch`), streams (`batches`), or the
transport of weights (`publisher`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.config import RunConfig
from pipeline.config.routing_shape import RoutingShape, routing_shape
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.batch_metrics import batch_metrics, replayed_fraction, zero_variance
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.evaluations import Evaluations
from pipeline.train.loop.group_batches import GroupBatches
from pipeline.train.loop.logprob_agreement import Agreement
from pipeline.train.loop.policy_update import PolicyUpdate
from pipeline.train.loop.recorded_batches import NoServers, RecordedBatches
from pipeline.train.loop.step_metrics import EqualRewards, NonFiniteGuard, TruncatedSamples
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.train.train_jobs import RlJob
from pipeline.transport.ledger import TRAINED
from pipeline.transport.sample_records import FILTERED, PreparedGroup, routed_array
from pipeline.transport.staleness import is_fresh

FAILED, UNTRAINED = "failed: gradient not finite", "filtered: no token counts"
"""Outcomes of the groups of a step without an update."""


class ReinforcementLearning:
    """The `Algorithm` of an `RlJob`. The policy version is the number of its completed steps."""

    def __init__(
        self,
        job: RlJob,
        config: RunConfig,
        dispatch: RankGroup,
        batches: GroupBatches | RecordedBatches,
        publisher: WeightPublisher | NoServers,
        evaluations: Evaluations | NoServers,
        warm_up: WarmUp,
    ) -> None:
        self.job = job
        self._config, self._batches, self._routing = config, batches, routing_shape(config)
        self._publisher, self._evaluations, self._warm_up = publisher, evaluations, warm_up
        self._update = PolicyUpdate(dispatch, config)
        self._holds_baseline = False
        self._skips, self._agreement, self._equal = NonFiniteGuard(), Agreement(), EqualRewards(config.loss)
        self._truncated = TruncatedSamples()
        self._agreement.known = not config.has_rollouts  # a replay has no servers, and another policy than sampled

    def begin(self, step: int) -> None:
        """Send the weights of `step` to the servers, and request an evaluation of them unless one is logged.

        A new job's result is the baseline of RL: the servers keep these weights until it is there, while the first
        steps train (`_keeps_first_weights`). The models are warmed up while the servers start.
        """
        self._update.begin(self.job.optim, self.job.steps, step)
        # The sender's threads deliver in the background, so compilation here overlaps with the servers' start.
        self._publisher.start(step)
        if step < self.job.steps:
            self._update.warm_up(self._warm_up)
        self._publisher.wait_until_synced()
        # The first progress on the board opens the actor's staleness gate, so it comes after a server is current.
        self._batches.publish_progress(step)
        due = self._evaluations.due(step)
        self._evaluations.request(step, due)
        self._holds_baseline = step == 0 and bool(due)

    def step(self, step: int) -> Mapping[str, float]:
        started = time.monotonic()
        groups = self._batches.next(version=step)
        waited = time.monotonic() - started
        training = self._config.training
        oldest = step - training.max_lag
        rows = rows_of(groups, training.masked_finish, oldest, self._routing, self._config.teacher.top_k)
        replayed = {} if self._routing is None else {"routing/replayed": replayed_fraction(rows)}
        self._update.measured = not self._agreement.known
        metrics = self._update.run(rows, step)
        batch_statistics = batch_metrics(groups, step, oldest)
        self._agreement.check(batch_statistics | metrics)
        self._truncated.note(batch_statistics["samples/truncated"])
        if not self._config.teacher.url:  # with a teacher, its KL term trains even if all rewards are equal
            self._equal.note([[sample.reward for sample in prepared.group.samples] for prepared in groups])
        self._batches.trained(step, self._outcome(metrics))
        timing = {"seconds/data": waited, "seconds/train": time.monotonic() - started - waited}
        discarded = self._batches.counts
        counts = {
            "tokens/batch": float(sum(map(len, rows))),
            "groups/discarded": float(discarded.total()),
            "groups/invalid": float(discarded["malformed"]),
            "groups/stale": float(discarded["stale"]),
            "groups/zero_variance": zero_variance(groups, dropped=discarded[FILTERED]),
        }
        return batch_statistics | metrics | timing | counts | replayed

    def after_step(self, done: int) -> Mapping[str, float]:
        """Publish the progress and the new weights, and request an evaluation if one is due.

        Raises `TrainingError` if the last `MAX_SKIPPED` steps were all skipped: the model has diverged.
        """
        self._skips.check()
        self._batches.publish_progress(done)
        self._evaluations.collect()
        if self._keeps_first_weights(done):
            return {}
        # One version is in flight at a time: the previous one must be on the servers, or they are evicted, before the
        # next is packed. Usually it arrived long ago, during the step.
        metrics = self._publisher.wait_until_synced() | self._publisher.start(done)
        if due := self._evaluations.due(done):
            # The servers must have this version before the actor evaluates it.
            metrics |= self._publisher.wait_until_synced()
            self._evaluations.request(done, due)
        return metrics

    def end(self) -> None:
        """Wait until the servers have the final weights, and for their evaluation."""
        self._publisher.wait_until_synced()
        last = self.job.steps
        self._evaluations.request(last, self._evaluations.due(last, last=True))
        self._evaluations.wait()

    def _keeps_first_weights(self, done: int) -> bool:
        """Whether the servers keep the first weights after step `done`, since their evaluation still runs.

        The samples of version 0 suffice for `max_lag + 1` steps, as the staleness gate counts them. Only then, or where
        other weights must be evaluated, training waits for the baseline.
        """
        if not self._holds_baseline:
            return False
        if self._evaluations.is_open(0):
            is_last, due = done == self.job.steps, self._evaluations.due(done)
            if done <= self._config.training.max_lag and not (is_last or due):
                return True
            self._evaluations.wait()
        self._holds_baseline = False
        return False

    @property
    def is_checkpointable(self) -> bool:
        """See `PolicyUpdate.is_checkpointable`."""
        return self._update.is_checkpointable

    def _outcome(self, metrics: Mapping[str, float]) -> str:
        if self._skips.note(metrics):
            return FAILED
        return TRAINED if metrics["optimizer_steps"] else UNTRAINED


def rows_of(
    groups: Sequence[PreparedGroup],
    masked: str | None = None,
    oldest: int = 0,
    routing: RoutingShape | None = None,
    top_k: int = 0,
) -> list[TrainSequence]:
    """The training rows of all samples, in order; with routed experts of the shape `routing` if they are replayed,
    and a teacher's `top_k` likeliest tokens.

    The mask excludes tokens that weights before version `oldest` sampled, and all tokens of a sample whose `finish` is
    `masked`.
    """
    rows = [
        TrainSequence(
            tokens=row.tokens,
            mask=np.zeros(len(row.tokens), np.bool_) if sample.finish == masked else is_fresh(row, oldest),
            advantages=advantage,
            sampler_logprobs=row.logprobs,
            prompt=prepared.group.position,
            episode=number,
            routed_experts=None if routing is None else routed_array(row, routing),
        )
        for prepared in groups
        for number, (sample, advantage) in enumerate(zip(prepared.group.samples, prepared.advantages, strict=True))
        for row in sample.rows(0 if routing is None else routing.token_bytes)
    ]
    references = (array for prepared in groups for array in prepared.reference_arrays())
    rows = [replace(row, reference=reference) for row, reference in zip(rows, references, strict=True)]
    return _with_top_tokens(rows, groups, top_k) if top_k else rows


def _with_top_tokens(rows: Sequence[TrainSequence], groups: Sequence[PreparedGroup], top_k: int) -> list[TrainSequence]:
    """The rows with the teacher's likeliest tokens where they are counted; the groups have them where tokens were
    sampled."""
    top_tokens = (tokens.arrays(top_k) for prepared in groups for tokens in prepared.top_tokens)
    sampled = (row.sampled for prepared in groups for sample in prepared.group.samples for row in sample.rows())
    counted = (row.mask[np.asarray(was_sampled, bool)] for row, was_sampled in zip(rows, sampled, strict=True))
    return [
        replace(row, top_ids=ids[keep], top_logprobs=logprobs[keep])
        for row, (ids, logprobs), keep in zip(rows, top_tokens, counted, strict=True)
    ]
