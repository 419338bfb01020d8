"""Evaluations: held-out prompts, sampled and scored.

Owns evaluations of the run's held-out prompts, with greedy sampling, and of each set of `evaluation.sets` with its own
settings. Promises that a sample which fails, or is not done by the set's deadline, is counted and reported, and left
out of every mean, since its failure is no answer of the policy; that an evaluation with more failures than
`evaluation.max_failed_fraction` has no accuracy and is an error in the log; that no failure of a set's task ends the
caller; and that the policy versions that sampled are reported.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev

from pipeline.config import EvalSetConfig, RunConfig
from pipeline.config.evaluation_keys import BUILTIN_SET
from pipeline.environments import Prompt, Task, load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.guarded_call import failure_reason
from pipeline.environments.task_calls import TaskCalls
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.errors import DeadlineError, TaskError
from pipeline.rollout.rollout_policy import Sampling
from pipeline.rollout.sample_rollout import completion_of, roll_out
from pipeline.rollout.sample_store import SampleRecord, records_of_evaluation
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.eval_records import ASKED, EVALUATED, EvalPart, EvalRequest, EvalResult
from pipeline.transport.sample_records import Sample, mean_metrics

log = logging.getLogger(__name__)

TIMED_OUT = "not done by the deadline of its evaluation"
Outcome = Sample | str
"""A sample, or the reason why there is none."""
OpenCalls = Callable[[], AbstractAsyncContextManager[TaskCalls]]


@dataclass(frozen=True)
class EvalSet:
    """One evaluation set, ready to run.

    Attributes:
        task, prompts: the task that runs the episodes, and the prompts.
        calls: opens the task calls that render prompts and compute rewards, for one evaluation.
        sampling, samples: the sampling parameters, and the number of samples per prompt.
        whole_answers: whether the rewards read more than the last turn.
        pass_at, correct: each k of pass@k, and the smallest reward of a correct sample.
        seconds: deadline of one evaluation; None: none.
    """

    task: Task
    prompts: Sequence[Prompt]
    calls: OpenCalls
    sampling: Sampling
    whole_answers: bool
    samples: int = 1
    pass_at: tuple[int, ...] = ()
    correct: float = 1.0
    seconds: float | None = None


class Evaluation:
    """Runs evaluations, with at most `rollout.concurrency` prompts at a time."""

    def __init__(
        self,
        task: Task,
        calls: TaskCalls,
        chat: ChatTokenizer,
        servers: InferenceClient,
        config: RunConfig,
        keep: Callable[[list[SampleRecord]], None] = lambda rows: None,
    ) -> None:
        """The run's own `task` runs its episodes in this process; `calls` renders its prompts and computes rewards.

        Loads the tasks of the sets. Their processes run only while a set is evaluated. `keep` receives the samples of
        each evaluation and must not block.
        """
        self._chat, self._servers, self._keep = chat, servers, keep
        self._sets = eval_sets(task, calls, config)
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._max_failed = config.evaluation.max_failed_fraction
        self._under_way, self._done, self._prompts = "", 0, 0

    @property
    def names(self) -> list[str]:
        """Names of all sets. The run's held-out prompts come first, with an empty name."""
        return list(self._sets)

    @property
    def detail(self) -> str:
        """Name and progress of the running evaluation, for people; empty if none runs."""
        return f"{self._under_way}: {self._done} of {self._prompts} prompts" if self._under_way else ""

    def numbers(self) -> dict[str, float]:
        """The number of prompts of the running evaluation, and of those done; empty if none runs."""
        return {EVALUATED: float(self._done), ASKED: float(self._prompts)} if self._under_way else {}

    async def run(self, request: EvalRequest) -> EvalResult:
        """Run the requested evaluation."""
        started = time.monotonic()
        chosen = self._sets[request.set]
        self._under_way, self._done, self._prompts = f"evaluating {request.set or BUILTIN_SET}", 0, len(chosen.prompts)
        try:
            outcomes = await self._outcomes(chosen)
        finally:
            self._under_way = ""
        labels = [prompt.task for prompt in chosen.prompts] if chosen.task.parts else []
        self._keep(records_of_evaluation(outcomes, chosen.task.name, request.set or BUILTIN_SET, labels))
        flat = [outcome for samples_of_prompt in outcomes for outcome in samples_of_prompt]
        samples = [outcome for outcome in flat if isinstance(outcome, Sample)]
        reasons = [outcome for outcome in flat if isinstance(outcome, str)]
        rewards = self._counted_rewards(request, outcomes, reasons)
        accuracy, error = _mean_and_error(rewards)
        return EvalResult(
            id=request.id,
            policy_version=request.policy_version,
            set=request.set,
            accuracy=accuracy,
            error=error,
            prompts=len(outcomes),
            samples=chosen.samples,
            version_min=min((sample.version_min for sample in samples), default=-1),
            version_max=max((sample.version_max for sample in samples), default=-1),
            seconds=time.monotonic() - started,
            failed=len(reasons),
            timed_out=reasons.count(TIMED_OUT),
            pass_at=_pass_at(chosen.pass_at, rewards, chosen.correct),
            metrics=mean_metrics(samples) if rewards else {},
            parts={label: self._part(outcomes, labels, label) for label in sorted(set(labels))},
        )

    def _part(self, outcomes: Sequence[Sequence[Outcome]], labels: Sequence[str], label: str) -> EvalPart:
        """The result of the prompts of one task of a mix, by the same rules as the whole."""
        own = [of_prompt for of_prompt, other in zip(outcomes, labels, strict=True) if other == label]
        failed = sum(isinstance(one, str) for of_prompt in own for one in of_prompt)
        accuracy, error = _mean_and_error([] if self._are_too_many(failed, own) else _rewards_of(own))
        return EvalPart(accuracy=accuracy, error=error, prompts=len(own), failed=failed)

    def _counted_rewards(
        self, request: EvalRequest, outcomes: Sequence[Sequence[Outcome]], reasons: Sequence[str]
    ) -> list[list[float]]:
        """The rewards of each prompt that has a sample. None at all, and an error in the log, if too many failed."""
        total = sum(map(len, outcomes))
        summary = (request.id, len(reasons), total, reasons[0] if reasons else "")
        if self._are_too_many(len(reasons), outcomes):
            log.error(
                "evaluation %s: %d of %d samples failed; the first: %s; it has no accuracy, since more than "
                "evaluation.max_failed_fraction=%g of its samples failed",
                *summary,
                self._max_failed,
            )
            return []
        if reasons:
            log.warning("evaluation %s: %d of %d samples failed; the first: %s; they do not count", *summary)
        return _rewards_of(outcomes)

    def _are_too_many(self, failed: int, outcomes: Sequence[Sequence[Outcome]]) -> bool:
        """Whether more samples than permitted failed. Samples often fail because they are long, so a mean over a small
        rest would be of the easy prompts."""
        return failed > self._max_failed * sum(map(len, outcomes))

    async def _outcomes(self, chosen: EvalSet) -> list[list[Outcome]]:
        """The outcomes of each prompt by the deadline."""
        # Prompts that are not done by the deadline keep this outcome.
        outcomes: list[list[Outcome]] = [[TIMED_OUT] * chosen.samples for _ in chosen.prompts]

        async def fill(calls: TaskCalls, index: int) -> None:
            outcomes[index] = await self._of_prompt(chosen, calls, chosen.prompts[index])
            self._done += 1

        try:
            async with asyncio.timeout(chosen.seconds) as limit, chosen.calls() as calls:
                filling = [asyncio.create_task(fill(calls, index)) for index in range(len(chosen.prompts))]
                try:
                    await asyncio.gather(*filling)
                finally:  # an error of one prompt ends the evaluation: the others would go on, and hold its slots
                    for task in filling:
                        task.cancel()
                    await asyncio.gather(*filling, return_exceptions=True)
        except TimeoutError:
            if not limit.expired():
                raise
        except (TaskError, DeadlineError) as error:  # the processes of its task cannot be started
            why = failure_reason("task raised", error)
            outcomes = [[why if one == TIMED_OUT else one for one in of_prompt] for of_prompt in outcomes]
        return outcomes

    async def _of_prompt(self, chosen: EvalSet, calls: TaskCalls, prompt: Prompt) -> list[Outcome]:
        """The outcome of each sample of a prompt."""
        async with self._slots:
            rendered = await calls.render(prompt)
            if isinstance(rendered, str):
                return [rendered] * chosen.samples
            rollouts = await roll_out(
                chosen.task, calls, self._chat, self._servers, chosen.sampling, rendered, chosen.samples
            )
            episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
            completions = [completion_of(episode, chosen.whole_answers) for episode in episodes]
            scores = iter(await calls.rewards(prompt, completions))
            return [one.reason if one.episode is None else one.scored(next(scores)) for one in rollouts]


def eval_sets(task: Task, calls: TaskCalls, config: RunConfig) -> dict[str, EvalSet]:
    """Every set of a run by name; the empty name is the run's held-out prompts."""
    rollout = config.rollout
    builtin = EvalSet(
        task=task,
        prompts=task.held_out(),
        calls=lambda: nullcontext(calls),
        sampling=Sampling(0.0, rollout.max_tokens, config.model.max_length, rollout.episode_seconds),
        whole_answers=config.reward.reads_conversations,
    )
    sets = {"": builtin} if config.evaluation.builtin_set else {}
    return sets | {name: _of_config(builtin, chosen, config) for name, chosen in config.evaluation.sets.items()}


def _of_config(builtin: EvalSet, keys: EvalSetConfig, config: RunConfig) -> EvalSet:
    if keys.task is not None:
        task, setup = (
            load_task(keys.task, config.seed),
            Setup(keys.task, config.seed, Path(config.model.path), keys.reward),
        )
        builtin = replace(
            builtin,
            task=task,
            prompts=task.held_out(),
            calls=lambda: _pool(setup, config.cluster.startup_seconds),
            whole_answers=keys.reward.reads_conversations,
        )
    sampling = replace(
        builtin.sampling,
        temperature=keys.temperature,
        max_tokens=keys.max_tokens or builtin.sampling.max_tokens,
        top_p=keys.top_p,
        top_k=keys.top_k,
    )
    return replace(
        builtin,
        prompts=builtin.prompts[: keys.prompts or len(builtin.prompts)],
        sampling=sampling,
        samples=keys.samples,
        pass_at=keys.pass_at,
        correct=keys.correct,
        seconds=keys.seconds,
    )


def accuracy_text(result: EvalResult) -> str:
    """The accuracy with three decimals for a log, or the number of failures where there is no accuracy."""
    return f"{result.accuracy:.3f}" if result.accuracy is not None else f"none, {result.failed} samples failed"


@asynccontextmanager
async def _pool(setup: Setup, startup_seconds: float) -> AsyncIterator[TaskCalls]:
    """The worker processes of a set's task."""
    async with WorkerPool(setup, startup_seconds) as pool:
        yield pool


def _rewards_of(outcomes: Sequence[Sequence[Outcome]]) -> list[list[float]]:
    """The rewards of the samples of each prompt that has any."""
    rewards = [[one.reward for one in of_prompt if isinstance(one, Sample)] for of_prompt in outcomes]
    return [of_prompt for of_prompt in rewards if of_prompt]


def _mean_and_error(rewards: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """The mean over the prompts of their mean rewards, and its standard error; None where there are too few."""
    means = [fmean(of_prompt) for of_prompt in rewards]
    return fmean(means) if means else None, stdev(means) / sqrt(len(means)) if len(means) > 1 else None


def _pass_at(ks: Sequence[int], rewards: Sequence[Sequence[float]], correct: float) -> dict[int, float]:
    """pass@k of each k over the prompts, without bias (Chen et al. 2021, equation 1): the probability that at least one
    of k samples, drawn without replacement from the prompt's samples, is correct.

    `rewards` are those of each prompt's samples. The estimate needs k samples of a prompt, so a prompt with fewer does
    not count for that k. Without any such prompt the k is missing.
    """
    by_k = {k: [of_prompt for of_prompt in rewards if len(of_prompt) >= k] for k in ks}
    return {
        k: fmean(
            _pass_of(k, len(of_prompt), sum(reward >= correct for reward in of_prompt)) for of_prompt in of_prompts
        )
        for k, of_prompts in by_k.items()
        if of_prompts
    }


def _pass_of(k: int, samples: int, correct: int) -> float:
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
