"""Held-out prompts, asked and scored.

Owns evaluations: of the run's own held-out prompts, greedily, and of each set of `evaluation.sets` as it says. Promises
that a sample which fails, or is not done by the set's deadline, counts as reward 0 and is told, so an accuracy is over
all prompts; that nothing a set's task does ends its caller; and that the versions which answered are told.
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
from pipeline.environments.rewards import Score
from pipeline.environments.task_calls import TaskCalls
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.errors import DeadlineError, TaskError
from pipeline.rollout.sample_rollout import Rollout, Sampling, completion_of, roll_out, to_sample
from pipeline.rollout.sample_store import SampleRecord, records_of_evaluation
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.sample_records import ASKED, EVALUATED, EvalRequest, EvalResult, Sample, mean_metrics

log = logging.getLogger(__name__)

TIMED_OUT = "not done by the deadline of its evaluation"
Outcome = Sample | str
"""A sample, or the reason why there is none."""
OpenCalls = Callable[[], AbstractAsyncContextManager[TaskCalls]]


@dataclass(frozen=True)
class EvalSet:
    """One set, ready to be asked.

    Attributes:
        task, prompts: whose episodes, and of which prompts.
        calls: opens what makes its prompts' texts and rewards, for one evaluation.
        sampling, samples: how each prompt is sampled, and how often.
        whole_answers: whether its rewards read more than the last turn.
        pass_at, correct: each k of pass@k, and the least reward of a correct sample.
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
    """Evaluates, at most `rollout.concurrency` prompts at a time."""

    def __init__(
        self,
        task: Task,
        calls: TaskCalls,
        chat: ChatTokenizer,
        servers: InferenceClient,
        config: RunConfig,
        keep: Callable[[list[SampleRecord]], None] = lambda rows: None,
    ) -> None:
        """The episodes of `task`, the run's own, run here; the text of its prompts and its rewards are had by `calls`.

        Loads the tasks of the sets; their processes run only while a set is evaluated. `keep` gets the samples of each
        evaluation, and does not wait.
        """
        self._chat, self._servers, self._keep = chat, servers, keep
        self._sets = eval_sets(task, calls, config)
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._under_way, self._done, self._prompts = "", 0, 0

    @property
    def names(self) -> list[str]:
        """Of all sets; the run's own held-out prompts come first, with an empty one."""
        return list(self._sets)

    @property
    def detail(self) -> str:
        """Which evaluation goes on and how far it is, for people; empty while none does."""
        return f"{self._under_way}: {self._done} of {self._prompts} prompts" if self._under_way else ""

    def numbers(self) -> dict[str, float]:
        """The prompts that the evaluation under way has, and how many of them are done; empty while none goes on."""
        return {EVALUATED: float(self._done), ASKED: float(self._prompts)} if self._under_way else {}

    async def run(self, request: EvalRequest) -> EvalResult:
        """The answer to a request."""
        started = time.monotonic()
        chosen = self._sets[request.set]
        self._under_way, self._done, self._prompts = f"evaluating {request.set or BUILTIN_SET}", 0, len(chosen.prompts)
        try:
            outcomes = await self._outcomes(chosen)
        finally:
            self._under_way = ""
        self._keep(records_of_evaluation(outcomes, chosen.task.name, request.set or BUILTIN_SET))
        flat = [outcome for each in outcomes for outcome in each]
        samples = [outcome for outcome in flat if isinstance(outcome, Sample)]
        reasons = [outcome for outcome in flat if isinstance(outcome, str)]
        if reasons:
            told = (request.id, len(reasons), len(flat), reasons[0])
            log.warning("evaluation %s: %d of %d samples failed; the first: %s", *told)
        means = [fmean(_reward(outcome) for outcome in each) for each in outcomes]
        return EvalResult(
            id=request.id,
            policy_version=request.policy_version,
            set=request.set,
            accuracy=fmean(means) if means else 0.0,
            error=stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0,
            prompts=len(outcomes),
            samples=chosen.samples,
            version_min=min((sample.version_min for sample in samples), default=-1),
            version_max=max((sample.version_max for sample in samples), default=-1),
            seconds=time.monotonic() - started,
            failed=len(reasons),
            timed_out=reasons.count(TIMED_OUT),
            pass_at={k: _pass_at(k, outcomes, chosen.correct) for k in chosen.pass_at},
            metrics=mean_metrics(samples),
        )

    async def _outcomes(self, chosen: EvalSet) -> list[list[Outcome]]:
        """What each prompt gave by the deadline."""
        outcomes: list[list[Outcome]] = [[TIMED_OUT] * chosen.samples for _ in chosen.prompts]

        async def fill(calls: TaskCalls, index: int) -> None:
            outcomes[index] = await self._of_prompt(chosen, calls, chosen.prompts[index])
            self._done += 1

        try:
            async with asyncio.timeout(chosen.seconds) as limit, chosen.calls() as calls:
                await asyncio.gather(*(fill(calls, index) for index in range(len(chosen.prompts))))
        except TimeoutError:
            if not limit.expired():
                raise
        except (TaskError, DeadlineError) as error:  # its processes cannot be started
            why = failure_reason("task raised", error)
            outcomes = [[why if outcome == TIMED_OUT else outcome for outcome in each] for each in outcomes]
        return outcomes

    async def _of_prompt(self, chosen: EvalSet, calls: TaskCalls, prompt: Prompt) -> list[Outcome]:
        """The samples of a prompt, or the reason why there is none."""
        async with self._slots:
            asked = await calls.render(prompt)
            if isinstance(asked, str):
                return [asked] * chosen.samples
            ended = await roll_out(
                chosen.task, calls, self._chat, self._servers, chosen.sampling, asked, chosen.samples
            )
            whole = [each.episode for each in ended if each.episode is not None]
            scores = iter(await calls.rewards(prompt, [completion_of(each, chosen.whole_answers) for each in whole]))
            return [each.reason if each.episode is None else _scored(each, next(scores)) for each in ended]


def eval_sets(task: Task, calls: TaskCalls, config: RunConfig) -> dict[str, EvalSet]:
    """Every set of a run by name; the empty name is that of its own held-out prompts."""
    rollout = config.rollout
    own = EvalSet(
        task=task,
        prompts=task.held_out(),
        calls=lambda: nullcontext(calls),
        sampling=Sampling(0.0, rollout.max_tokens, config.model.max_length, rollout.episode_seconds),
        whole_answers=bool(config.reward.functions),
    )
    asked = {"": own} if config.evaluation.builtin_set else {}
    return asked | {name: _of_config(own, each, config) for name, each in config.evaluation.sets.items()}


def _of_config(own: EvalSet, wanted: EvalSetConfig, config: RunConfig) -> EvalSet:
    if wanted.task is not None:
        task, setup = (
            load_task(wanted.task, config.seed),
            Setup(wanted.task, config.seed, Path(config.model.path), wanted.reward),
        )
        own = replace(
            own,
            task=task,
            prompts=task.held_out(),
            calls=lambda: _pool(setup, config.cluster.startup_seconds),
            whole_answers=bool(wanted.reward.functions),
        )
    sampling = replace(
        own.sampling,
        temperature=wanted.temperature,
        max_tokens=wanted.max_tokens or own.sampling.max_tokens,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
    )
    return replace(
        own,
        prompts=own.prompts[: wanted.prompts or len(own.prompts)],
        sampling=sampling,
        samples=wanted.samples,
        pass_at=wanted.pass_at,
        correct=wanted.correct,
        seconds=wanted.seconds,
    )


@asynccontextmanager
async def _pool(setup: Setup, startup_seconds: float) -> AsyncIterator[TaskCalls]:
    """The processes of a set's task."""
    async with WorkerPool(setup, startup_seconds) as pool:
        yield pool


def _scored(ended: Rollout, score: Score | str) -> Outcome:
    assert ended.episode is not None
    return score if isinstance(score, str) else to_sample(ended.episode, score, ended.seconds)


def _reward(outcome: Outcome) -> float:
    return outcome.reward if isinstance(outcome, Sample) else 0.0


def _pass_at(k: int, outcomes: Sequence[Sequence[Outcome]], correct: float) -> float:
    """pass@k over the prompts, without bias (Chen et al. 2021, equation 1): the probability that of k samples, drawn
    from those that there are without replacement, one is correct."""
    return fmean(_pass_of(k, len(each), sum(_is_correct(outcome, correct) for outcome in each)) for each in outcomes)


def _pass_of(k: int, samples: int, correct: int) -> float:
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def _is_correct(outcome: Outcome, correct: float) -> bool:
    return isinstance(outcome, Sample) and outcome.reward >= correct
