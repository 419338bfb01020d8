"""One step of reinforcement learning: everything between a batch of samples and a better policy.

Owns the algorithm. It knows nothing of ranks (`dispatch`), of where samples come from, nor of where weights go:

    1. the samples are cut into mini-batches by prompt, and their weights in the loss are fixed
    2. what the models say as the step begins: the policy's own log-probabilities (a KL in the reward, or
       `loss.proximal=recompute` with several optimizer steps: a single one has them in its own pass), the reference
       model's (`loss.kl`; a teacher's come with the rows), the critic's values (`loss.advantage=gae`)
    3. what each token deserves (`credit`)
    4. `update_epochs` times over the mini-batches, optimizer steps: first all of the critic, then all of the policy

Promises that a step depends on its rows, its number and the config alone, so one that is done again after a crash does
the same; and that a batch without a counted token trains nothing and harms nothing.

    update.begin(job.optim, job.steps, done)        # once, with the steps that are done already
    metrics = update.run(rows, step)                # step = done, done + 1, …
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.config import OptimConfig, RunConfig
from pipeline.train.algorithms import LossSpec, ValueLoss, token_advantages
from pipeline.train.batching.sequences import Batch, Column, TrainSequence, refuse_unsampled_rows
from pipeline.train.controller.batch_staging import Staged
from pipeline.train.controller.model_saving import expect_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.step_metrics import StepMetrics
from pipeline.train.worker_spec import models_of

Tokens = list[NDArray[np.float32]]
"""float32[T] for each row."""


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step trains: the batch's rows that count, and their places in the whole step."""

    row_indices: tuple[int, ...]
    batch: Batch


class PolicyUpdate:
    """Steps of one job of reinforcement learning, on the models that `models_of` names.

    Attributes:
        intact: False from the first optimizer step of a step until its last: if it ends in between, the models are none
            that a checkpoint may keep.
        measured: whether losses are measured even where `training.metrics` is `none`.
    """

    def __init__(self, dispatch: RankGroup, config: RunConfig) -> None:
        self._dispatch, self._config, self._loss = dispatch, config, config.loss
        self.is_checkpointable, self.measured = True, False

    def begin(self, optim: OptimConfig, steps: int, step: int) -> None:
        """Make the models ready for step `step` of `steps`.

        A fresh job (step 0) goes on with the policy that there is: a fresh optimizer, a reference model that is its
        copy, a critic that is its copy but for a fresh head. Of a job that goes on, all have been restored.
        """
        if step:
            return
        specs = models_of(self._config, "rl", optim, steps)
        self._dispatch.reset_optimizer("policy", optim, steps=specs["policy"].steps)
        others = [name for name in specs if name != "policy"]
        for name in others:
            self._dispatch.init_model(name, specs[name])
            self._dispatch.copy_parameters("policy", name)
        expect_save(self._dispatch, others)

    def warm_up(self, warm_up: WarmUp) -> None:
        """Have all that a step computes be compiled; after `begin`."""
        warm_up.run(self._objectives, self._asked)

    def run(self, rows: Sequence[TrainSequence], step: int) -> dict[str, float]:
        """Do step `step` with these rows, whose `advantages` are as the preprocessor or the packed file has them.

        Returns the metrics of docs/metrics.md; if no token counts, `optimizer_steps` is 0, and there are none of the
        loss.
        Raises `TrainingError` before anything is trained for rows that are malformed, not finite, or without
        `sampler_logprobs`.
        """
        every = self._loss.reference_every
        if self._config.has_reference and every and step and step % every == 0:
            self._dispatch.copy_parameters("policy", "reference")
        mini_batches = self._cut(rows, step)
        if not mini_batches:
            return {"optimizer_steps": 0.0, "skipped": 0.0, "tokens/left_out": float(sum(map(len, rows)))}
        with self._on_ranks(mini_batches) as staged:
            self._complete(staged, rows, mini_batches)
            spared = {"tokens/shared": float(sum(cut.saved_tokens for cut in staged.batches))}
            computed = sum(sum(each.batch.lengths) for each in mini_batches)
            spared["tokens/left_out"] = float(sum(map(len, rows)) - computed)
            return self._optimise(staged, mini_batches, step) | spared

    def _cut(self, rows: Sequence[TrainSequence], step: int) -> list[MiniBatch]:
        """The mini-batches that have counted tokens. Weights are decided over each whole one."""
        refuse_unsampled_rows(rows)
        if self._loss.proximal == "recompute":  # the policy as this step begins, not one of when a file was written
            rows = [replace(row, proximal=None) for row in rows]
        found: list[MiniBatch] = []
        for places in cut_by_prompt(rows, self._config.training.mini_batches, [self._config.seed, step]):
            batch = Batch.of(
                [rows[place] for place in places],
                self._loss.normalize,
                temperature=self._config.rollout.temperature,
                max_length=self._config.model.max_length,
            )
            live = [index for index, row in enumerate(batch.rows) if row.counted]
            if live:
                found.append(MiniBatch(tuple(places[index] for index in live), batch.take(live)))
        return found

    @contextmanager
    def _on_ranks(self, mini_batches: Sequence[MiniBatch]) -> Iterator[Staged]:
        staged = self._dispatch.stage([each.batch for each in mini_batches])
        try:
            yield staged
        finally:
            if not self._dispatch.broken:
                self._dispatch.unstage(staged)

    def _complete(self, staged: Staged, rows: Sequence[TrainSequence], mini_batches: Sequence[MiniBatch]) -> None:
        """Give the staged rows what the models say of them, and their advantages."""
        answers = self._ask(staged)
        columns: dict[str, Column] = {"reference": "reference", "critic": "values"}
        if self._loss.proximal == "recompute":
            columns["policy"] = "proximal"
        for name, column in columns.items():
            if name in answers:
                self._dispatch.set_column(staged, column, answers[name])
        if not token_advantages.needs_token_advantages(self._loss):
            return
        by_row = {name: _by_row(parts, rows, mini_batches) for name, parts in answers.items()}
        due = token_advantages.assign_advantages(
            rows, self._loss, by_row.get("policy"), by_row.get("reference", _has_advantage(rows)), by_row.get("critic")
        )
        self._dispatch.set_column(staged, "advantages", _by_part(due.advantages, mini_batches))
        if due.returns is not None:
            self._dispatch.set_column(staged, "returns", _by_part(due.returns, mini_batches))

    def _ask(self, staged: Staged) -> dict[str, list[Tokens]]:
        """What each model that is needed says of every mini-batch's rows: all of them at once, or where they take turns
        on the device, one after the other, so that each comes there once."""
        names = self._asked
        if not names:
            return {}
        if self._config.training.offload:
            return {name: [self._dispatch.forward(name, batch) for batch in staged.batches] for name in names}
        answers = [self._dispatch.forward_each(names, batch) for batch in staged.batches]
        return {name: [answer[name] for answer in answers] for name in names}

    @property
    def _asked(self) -> list[str]:
        """The models that say something of the rows before any is trained."""
        several = self._config.training.update_epochs * self._config.training.mini_batches > 1
        asked = {
            "policy": (self._loss.proximal == "recompute" and several) or token_advantages.has_kl_in_reward(self._loss),
            "reference": self._config.has_reference,
            "critic": self._loss.advantage == "gae",
        }
        return [name for name, needed in asked.items() if needed]

    @property
    def _objectives(self) -> dict[str, LossSpec]:
        """The models that are trained, in order, and on what."""
        critic: dict[str, LossSpec] = {"critic": ValueLoss(self._config.critic.clip)}
        return (critic if self._loss.advantage == "gae" else {}) | {"policy": self._loss}

    def _optimise(self, staged: Staged, mini_batches: Sequence[MiniBatch], step: int) -> dict[str, float]:
        """All optimizer steps: the critic's, then the policy's, since neither sees the other within a step."""
        self.is_checkpointable = False
        metrics: dict[str, float] = {}
        for model, objective in self._objectives.items():
            found = self._train(model, objective, staged, mini_batches, step)
            metrics |= found if model == "policy" else {f"{model}/{name}": value for name, value in found.items()}
        self.is_checkpointable = True
        return metrics | {"optimizer_steps": float(self._config.training.update_epochs * len(mini_batches))}

    def _train(
        self, name: str, objective: LossSpec, staged: Staged, mini_batches: Sequence[MiniBatch], step: int
    ) -> dict[str, float]:
        tally, training = StepMetrics(), self._config.training
        level = "basic" if self.measured and training.metrics == "none" else training.metrics
        for epoch in range(training.update_epochs):
            for number in in_order_of(epoch, len(mini_batches), [self._config.seed, step]):
                metrics = self._dispatch.forward_backward(name, staged[number], objective, level=level)
                metrics |= self._dispatch.optim_step(name)
                tally.add(metrics, mini_batches[number].batch.counted)
        return tally.metrics()


def cut_by_prompt(rows: Sequence[TrainSequence], count: int, seed: Sequence[int]) -> list[list[int]]:
    """The places of the rows of at most `count` mini-batches: all samples of a prompt in one of them, prompts dealt out
    at random, as many to each (or one less). Places ascend; a single mini-batch has all rows in order."""
    prompts = np.array(list(dict.fromkeys(row.prompt for row in rows)))
    dealt = np.random.default_rng(list(seed)).permutation(prompts)
    parts = [frozenset(part.tolist()) for part in np.array_split(dealt, count) if len(part)]
    return [[place for place, row in enumerate(rows) if row.prompt in part] for part in parts]


def in_order_of(epoch: int, count: int, seed: Sequence[int]) -> list[int]:
    """The order in which an epoch trains `count` mini-batches: a shuffle of its own."""
    order: list[int] = np.random.default_rng([*seed, epoch]).permutation(count).tolist()
    return order


def _by_row(parts: Sequence[Tokens], rows: Sequence[TrainSequence], mini_batches: Sequence[MiniBatch]) -> Tokens:
    """For every row of the step, what was said of it: 0 for those that do not count."""
    found = [np.zeros(len(row), np.float32) for row in rows]
    for mini_batch, answers in zip(mini_batches, parts, strict=True):
        for place, answer in zip(mini_batch.row_indices, answers, strict=True):
            found[place] = answer
    return found


def _has_advantage(rows: Sequence[TrainSequence]) -> Tokens | None:
    """What a teacher says of each row, which came with it; None without one."""
    found = [row.reference for row in rows if row.reference is not None]
    return found if len(found) == len(rows) else None


def _by_part(numbers: Tokens, mini_batches: Sequence[MiniBatch]) -> list[Tokens]:
    return [[numbers[place] for place in mini_batch.row_indices] for mini_batch in mini_batches]
