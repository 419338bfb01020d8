"""Reinforcement learning from groups that the actor sampled with weights up to `max_lag` steps old.

This file is the algorithm: take a batch of groups, one optimizer step, send the weights to the servers, evaluate now
and then. It knows nothing of ranks (`dispatch`), of how groups come (`batches`), nor of how weights travel
(`publisher`).
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config import RunConfig
from pipeline.errors import TrainingError
from pipeline.ledger import TRAINED
from pipeline.records import PreparedGroup
from pipeline.training.batches import GroupBatches
from pipeline.training.dispatch import Dispatch
from pipeline.training.evaluation import Evaluations
from pipeline.training.jobs import RlJob
from pipeline.training.publisher import Publisher
from pipeline.training.rows import Batch, Row

MOST_SKIPPED = 5
"""Steps in a row whose gradient may be not finite."""


class ReinforcementLearning:
    """The `Algorithm` of an `RlJob`. The weight version is the number of its steps done."""

    def __init__(
        self,
        job: RlJob,
        config: RunConfig,
        dispatch: Dispatch,
        batches: GroupBatches,
        publisher: Publisher,
        evaluations: Evaluations,
    ) -> None:
        self.job = job
        self._config, self._dispatch, self._batches = config, dispatch, batches
        self._publisher, self._evaluations = publisher, evaluations
        self._skipped = 0

    def begin(self, step: int) -> None:
        """Bring the servers to the weights of `step`, and measure them if no earlier attempt did.

        Only a fresh job waits for that: it says where RL starts from.
        """
        if step == 0:
            self._dispatch.reset_optimizer("policy", self.job.optim, steps=self.job.steps)
        self._publisher.start(step)
        self._publisher.settle()
        self._batches.tell_progress(step)
        if self._is_due(step):
            self._evaluations.request(step)
        if step == 0:
            self._evaluations.wait()

    def step(self, step: int) -> Mapping[str, float]:
        started = time.monotonic()
        groups = self._batches.next(version=step)
        waited = time.monotonic() - started
        loss = self._config.loss
        batch = Batch.of(
            rows_of(groups),
            loss.normalise,
            temperature=self._config.rollout.temperature,
            max_length=self._config.model.max_length,
        )
        metrics = self._dispatch.forward_backward("policy", batch, loss)
        metrics |= self._dispatch.optim_step("policy")
        self._batches.trained(step, self._outcome(metrics))
        timing = {"seconds/data": waited, "seconds/train": time.monotonic() - started - waited}
        counts = {"tokens/batch": float(sum(batch.lengths)), "set_aside": float(self._batches.counts.total())}
        return metrics | describe(groups, step) | timing | counts

    def follow_up(self, done: int) -> Mapping[str, float]:
        """Tell the progress, send the new weights, and ask for an evaluation when it is time.

        Raises `TrainingError` when the last steps were all skipped: the model is lost.
        """
        if self._skipped >= MOST_SKIPPED:
            raise TrainingError(f"the gradient was not finite in {self._skipped} steps in a row; lower optim.lr")
        self._batches.tell_progress(done)
        metrics = self._publisher.settle() | self._publisher.start(done)
        if self._is_due(done):
            metrics |= self._publisher.settle()
            self._evaluations.request(done)
        self._evaluations.collect()
        return metrics

    def end(self) -> None:
        """Bring every server to the final weights and measure them."""
        self._publisher.settle()
        if self._evaluations.wants(self.job.steps):
            self._evaluations.request(self.job.steps)
        self._evaluations.wait()

    def committed(self) -> None:
        self._batches.acknowledge()

    def _is_due(self, version: int) -> bool:
        every = self._config.training.eval_every
        return (version == 0 or (every > 0 and version % every == 0)) and self._evaluations.wants(version)

    def _outcome(self, metrics: Mapping[str, float]) -> str:
        """What becomes of the groups of a step: a skipped one taught nothing."""
        self._skipped = self._skipped + 1 if metrics["skipped"] else 0
        return "failed: gradient not finite" if self._skipped else TRAINED


def rows_of(groups: Sequence[PreparedGroup]) -> list[Row]:
    """One row for each sample, in order."""
    rows: list[Row] = []
    for prepared in groups:
        references = prepared.reference_logprobs or (b"",) * len(prepared.group.samples)
        for sample, advantage, reference in zip(prepared.group.samples, prepared.advantages, references, strict=True):
            row = Row(
                tokens=sample.token_array(),
                mask=sample.sampled_array(),
                advantages=advantage,
                behaviour=sample.logprob_array(),
                reference=np.frombuffer(reference, "<f4") if reference else None,
                prompt=prepared.group.position,
            )
            rows.append(row)
    return rows


def describe(groups: Sequence[PreparedGroup], version: int) -> dict[str, float]:
    """What a batch is like: reward, lengths, and the lag of every sample trained at `version`."""
    samples = [sample for prepared in groups for sample in prepared.group.samples]
    rewards = np.array([sample.reward for sample in samples])
    lags = np.array([version - sample.version_min for sample in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        "samples": float(len(samples)),
        "samples/cut": float(np.mean([sample.finish == "length" for sample in samples])),
        "groups/failed_samples": float(sum(len(prepared.group.failures) for prepared in groups)),
    }
