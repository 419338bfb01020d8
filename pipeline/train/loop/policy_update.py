"""One step of reinforcement learning, from a batch of rows to an updated policy.

Owns the algorithm, independent of ranks (`dispatch`), of the source of samples, and of the servers:

    1. Split the rows into mini-batches by prompt, and fix the weight of each row in the loss.
    2. Compute forward passes with the models of the step's begin: the policy's log-probabilities (for a KL in the
       reward, or for `loss.old_logprobs=recompute` with several optimizer steps; a single one has them in its own
       pass), the reference model's (`loss.kl`; a teacher's come with the rows), the critic's values
       (`loss.advantage_estimator=gae`).
    3. Compute the advantage of each token (`token_advantages`), over the whole batch.
    4. Take the optimizer steps, `update_epochs` times over the mini-batches: first all of the critic, then all of the
       policy.

Promises that a step depends on its rows, its number and the config alone, so its repetition after a crash gives the
same result; and that a batch without a counted token changes nothing.

    update.begin(job.optim, job.steps, done)        # once, with the number of completed steps
    metrics = update.run(rows, step)                # step = done, done + 1, …
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.config import OptimConfig, RunConfig
from pipeline.train.batching import token_advantages
from pipeline.train.batching.sequences import Batch, Column, TrainSequence, refuse_unsampled_rows
from pipeline.train.controller.batch_staging import Staged
from pipeline.train.controller.model_saving import expect_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.overflow_retries import MAX_OVERFLOWS, passes_left, train_batch
from pipeline.train.loop.step_metrics import StepMetrics
from pipeline.train.loss_specs import LossSpec, ValueLoss
from pipeline.train.worker_spec import models_of

Tokens = list[NDArray[np.float32]]
"""float32[T] of each row."""


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step that have counted tokens, and their indices among all rows of the step."""

    row_indices: tuple[int, ...]
    batch: Batch


class PolicyUpdate:
    """Steps of one RL job, on the models of `models_of`.

    Attributes:
        is_checkpointable: False from the first optimizer step of a step until its last. A step that fails in between
            leaves partially updated models, which no checkpoint may contain.
        measured: whether metrics of the loss are computed even if `training.metrics` is `none`.
    """

    def __init__(self, dispatch: RankGroup, config: RunConfig) -> None:
        self._dispatch, self._config, self._loss = dispatch, config, config.loss
        self.is_checkpointable, self.measured = True, False

    def begin(self, optim: OptimConfig, steps: int, step: int) -> None:
        """Prepare the models for step `step` of `steps`.

        A new job (step 0) starts from the current policy: with a new optimizer, a reference model that is a copy, and a
        critic that is a copy with a new head. For a resumed job the checkpoint has restored all of them.
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
        """Compile all passes of a step; after `begin`."""
        warm_up.run(self._objectives, self._models_to_query)

    def run(self, rows: Sequence[TrainSequence], step: int) -> dict[str, float]:
        """Execute step `step` with these rows; `advantages` of each is the scalar from the preprocessor or packed file.

        Returns the metrics of docs/metrics.md. If no token counts, `optimizer_steps` is 0 and there are no metrics of
        the loss. Raises `TrainingError` before any update for rows that are malformed, not finite, or without
        `sampler_logprobs`.
        """
        every = self._loss.reference_every
        if self._config.has_reference and every and step and step % every == 0:
            self._dispatch.copy_parameters("policy", "reference")
        mini_batches = self._mini_batches(rows, step)
        if not mini_batches:
            return {"optimizer_steps": 0.0, "skipped": 0.0, "tokens/left_out": float(sum(map(len, rows)))}
        with self._on_ranks(mini_batches) as staged:
            self._attach_columns(staged, rows, mini_batches)
            computed = sum(sum(mini_batch.batch.lengths) for mini_batch in mini_batches)
            saved = {
                "tokens/shared": float(sum(batch.saved_tokens for batch in staged.batches)),
                "tokens/left_out": float(sum(map(len, rows)) - computed),
            }
            return self._optimize(staged, mini_batches, step) | saved

    def _mini_batches(self, rows: Sequence[TrainSequence], step: int) -> list[MiniBatch]:
        """The mini-batches that have counted tokens, each with its rows that have some."""
        refuse_unsampled_rows(rows)
        if self._loss.old_logprobs == "recompute":  # a packed file may have values of an earlier policy
            rows = [replace(row, old_logprobs=None) for row in rows]
        mini_batches: list[MiniBatch] = []
        for row_indices in split_by_prompt(rows, self._config.training.mini_batches, [self._config.seed, step]):
            # The weights count all rows of the mini-batch; only then are rows without counted tokens removed, which
            # saves their forward pass and changes no denominator.
            batch = Batch.of(
                [rows[index] for index in row_indices],
                self._loss.normalize,
                temperature=self._config.rollout.temperature,
                max_length=self._config.model.max_length,
            )
            live = [index for index, row in enumerate(batch.rows) if row.counted]
            if live:
                mini_batches.append(MiniBatch(tuple(row_indices[index] for index in live), batch.take(live)))
        return mini_batches

    @contextmanager
    def _on_ranks(self, mini_batches: Sequence[MiniBatch]) -> Iterator[Staged]:
        """Send all rows to the ranks once, for every pass of the step."""
        staged = self._dispatch.stage([mini_batch.batch for mini_batch in mini_batches])
        try:
            yield staged
        finally:
            if not self._dispatch.broken:
                self._dispatch.unstage(staged)

    def _attach_columns(self, staged: Staged, rows: Sequence[TrainSequence], mini_batches: Sequence[MiniBatch]) -> None:
        """Add the results of the forward passes and the advantages to the staged rows."""
        outputs = self._forward_all(staged)
        columns: dict[str, Column] = {"reference": "reference", "critic": "values"}
        if self._loss.old_logprobs == "recompute":
            columns["policy"] = "old_logprobs"
        for name, column in columns.items():
            if name in outputs:
                self._dispatch.set_column(staged, column, outputs[name])
        if not token_advantages.needs_token_advantages(self._loss):
            return
        # Advantages are normalized over the whole step, so the mini-batches' outputs return to the order of `rows`.
        by_row = {name: _by_row(parts, rows, mini_batches) for name, parts in outputs.items()}
        assigned = token_advantages.assign_advantages(
            rows,
            self._loss,
            by_row.get("policy"),
            by_row.get("reference", _teacher_logprobs(rows)),
            by_row.get("critic"),
        )
        self._dispatch.set_column(staged, "advantages", _by_mini_batch(assigned.advantages, mini_batches))
        if assigned.returns is not None:
            self._dispatch.set_column(staged, "returns", _by_mini_batch(assigned.returns, mini_batches))

    def _forward_all(self, staged: Staged) -> dict[str, list[Tokens]]:
        """The outputs of the models before the update, by model and mini-batch: log-probabilities, or values."""
        names = self._models_to_query
        if not names:
            return {}
        if self._config.training.offload_idle_models:
            # Models share the device in turns: all mini-batches of one model first, so that each is loaded once.
            return {name: [self._dispatch.forward(name, batch) for batch in staged.batches] for name in names}
        outputs = [self._dispatch.forward_models(names, batch) for batch in staged.batches]
        return {name: [output[name] for output in outputs] for name in names}

    @property
    def _models_to_query(self) -> list[str]:
        """The models with a forward pass before the first optimizer step."""
        several = self._config.training.update_epochs * self._config.training.mini_batches > 1
        needs = {
            "policy": (self._loss.old_logprobs == "recompute" and several)
            or token_advantages.has_kl_in_reward(self._loss),
            "reference": self._config.has_reference,
            "critic": self._loss.estimator.has_critic,
        }
        return [name for name, needed in needs.items() if needed]

    @property
    def _objectives(self) -> dict[str, LossSpec]:
        """The trained models, in order, with their losses."""
        critic: dict[str, LossSpec] = {"critic": ValueLoss(self._config.critic.clip)}
        return (critic if self._loss.estimator.has_critic else {}) | {"policy": self._loss}

    def _optimize(self, staged: Staged, mini_batches: Sequence[MiniBatch], step: int) -> dict[str, float]:
        """Take all optimizer steps: the critic's, then the policy's, since neither depends on the other in a step."""
        self.is_checkpointable = False
        metrics: dict[str, float] = {}
        for model, objective in self._objectives.items():
            results = self._train(model, objective, staged, mini_batches, step)
            metrics |= results if model == "policy" else {f"{model}/{name}": value for name, value in results.items()}
        self.is_checkpointable = True
        return metrics | {"optimizer_steps": float(self._config.training.update_epochs * len(mini_batches))}

    def _train(
        self, name: str, objective: LossSpec, staged: Staged, mini_batches: Sequence[MiniBatch], step: int
    ) -> dict[str, float]:
        step_metrics, training = StepMetrics(), self._config.training
        level = "basic" if self.measured and training.metrics == "none" else training.metrics
        passes = [MAX_OVERFLOWS] * len(mini_batches)
        for epoch in range(training.update_epochs):
            for number in in_order_of(epoch, len(mini_batches), [self._config.seed, step]):
                metrics = train_batch(self._dispatch, name, staged[number], objective, level, passes=passes[number])
                passes[number] = passes_left(passes[number], metrics)
                step_metrics.add(metrics, mini_batches[number].batch.counted)
        return step_metrics.metrics()


def split_by_prompt(rows: Sequence[TrainSequence], count: int, seed: Sequence[int]) -> list[list[int]]:
    """The row indices of at most `count` mini-batches. All samples of a prompt are in one mini-batch; prompts are
    assigned at random, the same number to each (or one less). Indices ascend."""
    prompts = np.array(list(dict.fromkeys(row.prompt for row in rows)))
    shuffled = np.random.default_rng(list(seed)).permutation(prompts)
    parts = [frozenset(part.tolist()) for part in np.array_split(shuffled, count) if len(part)]
    return [[index for index, row in enumerate(rows) if row.prompt in part] for part in parts]


def in_order_of(epoch: int, count: int, seed: Sequence[int]) -> list[int]:
    """The order of `count` mini-batches in an epoch: a permutation by seed and epoch."""
    order: list[int] = np.random.default_rng([*seed, epoch]).permutation(count).tolist()
    return order


def _by_row(parts: Sequence[Tokens], rows: Sequence[TrainSequence], mini_batches: Sequence[MiniBatch]) -> Tokens:
    """The outputs of the mini-batches in the order of `rows`: float32[T] of each, 0 for rows without counted tokens."""
    by_row = [np.zeros(len(row), np.float32) for row in rows]
    for mini_batch, outputs in zip(mini_batches, parts, strict=True):
        for index, output in zip(mini_batch.row_indices, outputs, strict=True):
            by_row[index] = output
    return by_row


def _teacher_logprobs(rows: Sequence[TrainSequence]) -> Tokens | None:
    """The teacher's log-probabilities, which are part of the rows; None without a teacher."""
    references = [row.reference for row in rows if row.reference is not None]
    return references if len(references) == len(rows) else None


def _by_mini_batch(values: Tokens, mini_batches: Sequence[MiniBatch]) -> list[Tokens]:
    return [[values[index] for index in mini_batch.row_indices] for mini_batch in mini_batches]
