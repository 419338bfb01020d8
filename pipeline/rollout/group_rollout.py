"""All rollouts of the prompt of a position, as one group.

Owns the building of groups and the patience with a task that fails. Promises that `build` always returns a group, of
samples and of reasons that together are `rollout.group_size`; with `rollout.oversample` at most so many samples, the
first that ended, and every reason until then. It raises only `TaskError`, when `rollout.max_consecutive_failures`
samples in a row failed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config import RunConfig
from pipeline.environments import Prompt, Task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_calls import RenderedPrompt, TaskCalls
from pipeline.errors import TaskError
from pipeline.rollout.sample_rollout import (
    Rollout,
    Sampling,
    completion_of,
    failure_kind,
    roll_out,
    to_sample,
)
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.ledger import prompt_at
from pipeline.transport.sample_records import Group, Sample


@dataclass
class FailureStreak:
    """Counts samples that failed in a row; one that succeeds starts the count again."""

    limit: int
    failed: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, succeeded: int, failures: Sequence[str]) -> None:
        """Count the end of a group; `TaskError` when patience runs out."""
        self.counts.update(map(failure_kind, failures))
        self.failed = 0 if succeeded else self.failed + len(failures)
        if self.failed >= self.limit:
            raise TaskError(
                f"{self.failed} samples in a row failed (rollout.max_consecutive_failures={self.limit}); the last: "
                f"{failures[-1]}"
            )


class GroupBuilder:
    """Makes the group of a position."""

    def __init__(
        self, task: Task, calls: TaskCalls, chat: ChatTokenizer, servers: InferenceClient, config: RunConfig
    ) -> None:
        """The episodes of `task` run here; its prompts and rewards are had by `calls`."""
        rollout = config.rollout
        self._task, self._calls, self._chat, self._servers = task, calls, chat, servers
        self._seed, self._size, self._extra = config.seed, rollout.group_size, rollout.oversample
        self._whole_answers = bool(config.reward.functions)
        length, seconds = config.model.max_length, rollout.episode_seconds
        self._sampling = Sampling(rollout.temperature, rollout.max_tokens, length, seconds)
        self.patience = FailureStreak(rollout.max_consecutive_failures)

    async def build(self, position: int) -> Group:
        """The group at a position; `TaskError` when the task keeps failing."""
        index = prompt_at(position, len(self._task), self._seed)
        asked = await self._calls.prompt(index)
        if isinstance(asked, str):
            group = Group(position=position, prompt=index, failures=(asked,) * self._size)
        else:
            group = await self._sampled(position, index, asked)
        self.patience.note(len(group.samples), group.failures)
        return group

    async def _sampled(self, position: int, index: int, asked: RenderedPrompt) -> Group:
        environment = self._task, self._calls, self._chat, self._servers
        rollouts = await roll_out(*environment, self._sampling, asked, self._size, self._extra)
        samples, failures = await self._scored(asked.prompt, rollouts)
        abandoned = tuple(each.seconds for each in rollouts if each.abandoned)
        return Group(
            position=position, prompt=index, samples=tuple(samples), failures=tuple(failures), abandoned=abandoned
        )

    async def _scored(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> tuple[list[Sample], list[str]]:
        """The samples of a prompt's rollouts, and the reasons of those that failed."""
        failures = [ended.reason for ended in rollouts if ended.episode is None and not ended.abandoned]
        ended = [(done.episode, done.seconds) for done in rollouts if done.episode is not None]
        answers = [completion_of(episode, self._whole_answers) for episode, _ in ended]
        scores = await self._calls.rewards(prompt, answers) if ended else []
        samples = []
        for (episode, seconds), score in zip(ended, scores, strict=True):
            if isinstance(score, str):
                failures.append(score)
            else:
                samples.append(to_sample(episode, score, seconds))
        return samples, failures
