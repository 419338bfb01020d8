"""Held-out accuracy.

Owns the greedy evaluation of a task's held-out prompts on all servers. Promises that a prompt whose sample fails counts
as reward 0 and is told, so an accuracy is always over all prompts, and that the versions which answered are told.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from pipeline.config import RunConfig
from pipeline.groups.records import EvalRequest, EvalResult, Sample, mean_metrics
from pipeline.rollouts.rollout import Sampling, Servers, answer_of, roll_out, sample_of
from pipeline.tasks import Prompt, Task
from pipeline.tasks.calls import Calls
from pipeline.tasks.chat import Chat

log = logging.getLogger(__name__)


class Evaluation:
    """Evaluates, at most `rollout.concurrency` prompts at a time."""

    def __init__(self, task: Task, calls: Calls, chat: Chat, servers: Servers, config: RunConfig) -> None:
        """The episodes of `task` run here; the text of its prompts and its rewards are had by `calls`."""
        self._task, self._calls, self._chat, self._servers = task, calls, chat, servers
        self._whole_answers = bool(config.reward.functions)
        rollout = config.rollout
        self._sampling = Sampling(0.0, rollout.max_tokens, config.model.max_length, rollout.episode_seconds)
        self._prompts: Sequence[Prompt] = task.held_out()
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    async def run(self, request: EvalRequest) -> EvalResult:
        """The answer to a request."""
        started = time.monotonic()
        outcomes = await asyncio.gather(*(self._one(prompt) for prompt in self._prompts))
        samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
        reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if reasons:
            log.warning(
                "evaluation %s: %d of %d prompts failed; the first: %s",
                request.id,
                len(reasons),
                len(outcomes),
                reasons[0],
            )
        return EvalResult(
            id=request.id,
            weights=request.weights,
            accuracy=sum(sample.reward for sample in samples) / max(1, len(self._prompts)),
            prompts=len(self._prompts),
            version_min=min((sample.version_min for sample in samples), default=-1),
            version_max=max((sample.version_max for sample in samples), default=-1),
            seconds=time.monotonic() - started,
            failed=len(reasons),
            metrics=mean_metrics(samples),
        )

    async def _one(self, prompt: Prompt) -> Sample | str:
        """The sample of a prompt, or the reason why there is none."""
        async with self._slots:
            asked = await self._calls.render(prompt)
            if isinstance(asked, str):
                return asked
            (ended,) = await roll_out(self._task, self._calls, self._chat, self._servers, self._sampling, asked, 1)
            if ended.episode is None:
                return ended.reason
            (score,) = await self._calls.rewards(prompt, [answer_of(ended.episode, self._whole_answers)])
            return score if isinstance(score, str) else sample_of(ended.episode, score, ended.seconds)
