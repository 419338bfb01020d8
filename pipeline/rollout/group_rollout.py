"""All rollouts of the prompt of a position, as one group.

Owns the building of groups and the limit on consecutive failures of a task. Samples that a lost actor recorded continue
(`pipeline.rollout.episode_record`). Promises that `build` always returns a
group whose samples and failure reasons number `rollout.group_size`. With `rollout.oversample` the group holds at most
that many samples, the first to end, and all failure reasons until then. Raises only `TaskError`, when
`rollout.max_consecutive_failures` consecutive samples failed.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.environments import Prompt, Task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.guarded_call import call_guarded
from pipeline.environments.task_calls import RenderedPrompt, TaskCalls
from pipeline.errors import TaskError
from pipeline.rollout.curriculum import MIN_WINDOW, Curriculum
from pipeline.rollout.episode_journal import EpisodeJournal
from pipeline.rollout.episode_record import GroupRecord
from pipeline.rollout.prompt_order import PromptOrder
from pipeline.rollout.rollout_policy import Sampling
from pipeline.rollout.sample_rollout import Rollout, completion_of, failure_kind, roll_out
from pipeline.rollout.server_pool import InferenceClient
from pipeline.run.paths import RunPaths
from pipeline.transport.sample_records import Group, Sample, solved_fraction


@dataclass
class FailureStreak:
    """Counts consecutive failed samples; one success resets the count."""

    limit: int
    failed: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, succeeded: int, failures: Sequence[str]) -> None:
        """Count the samples of a group; `TaskError` when the limit is reached."""
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
        self,
        task: Task,
        calls: TaskCalls,
        chat: ChatTokenizer,
        servers: InferenceClient,
        config: RunConfig,
        journal: EpisodeJournal | None = None,
        run: RunPaths | None = None,
    ) -> None:
        """Episodes of `task` run in this process; `calls` makes its prompts and rewards. `journal` records episodes in
        flight; by default nothing is recorded. A curriculum needs the files of the `run`."""
        rollout = config.rollout
        self._task, self._calls, self._chat, self._servers = task, calls, chat, servers
        self._order, keys = PromptOrder(task, config.seed), rollout.curriculum
        self.curriculum: Curriculum | None = None
        if run is not None and keys.weight < 1:
            window = max(MIN_WINDOW, config.training.prompts_per_step)
            self.curriculum = Curriculum(self._order, keys, config.seed, window, run.curriculum, run.ledger)
        self._choosing, self._correct = asyncio.Lock(), keys.correct
        self._size, self._extra = rollout.group_size, rollout.oversample
        self._whole_answers = config.reward.reads_conversations
        length, seconds = config.model.max_length, rollout.episode_seconds
        self._sampling = Sampling(rollout.temperature, rollout.max_tokens, length, seconds)
        self._stale = config.training.stale
        self.journal = journal or EpisodeJournal(Path(), 0)
        self.patience = FailureStreak(rollout.max_consecutive_failures)

    async def build(self, position: int, oldest: int = 0) -> Group:
        """The group of a position; `TaskError` when the task keeps failing. Recorded tokens of policy versions before
        `oldest` are too old (`pipeline.transport.staleness.is_usable`)."""
        index = await self._prompt_of(position)
        rendered = await self._calls.prompt(index)
        if isinstance(rendered, str):
            label = self._order.label(index)
            group = Group(position=position, prompt=index, failures=(rendered,) * self._size, task=label)
        else:
            record = GroupRecord(position, self.journal, self._size + self._extra, oldest, self._stale)
            group = await self._sampled(position, index, rendered, record)
        self.patience.note(len(group.samples), group.failures)
        solved = solved_fraction(group, self._correct)
        if self.curriculum is not None and solved is not None:
            self.curriculum.note(index, solved)
        return group

    async def _prompt_of(self, position: int) -> int:
        """The prompt of a position. A curriculum reads or writes a file for it once in a while, in a thread."""
        if self.curriculum is None:
            return self._order.at(position)
        async with self._choosing:
            if self.curriculum.is_known(position):
                return self.curriculum.at(position)
            return await asyncio.to_thread(self.curriculum.at, position)

    async def _sampled(self, position: int, index: int, rendered: RenderedPrompt, record: GroupRecord) -> Group:
        environment = self._task, self._calls, self._chat, self._servers
        replays = call_guarded("can_replay raised", lambda: self._task.can_replay(rendered.prompt)) is True
        records = record.begin(replays)
        rollouts = await roll_out(*environment, self._sampling, rendered, self._size, self._extra, records)
        samples, failures = await self._scored(rendered.prompt, rollouts)
        abandoned = tuple(rollout.seconds for rollout in rollouts if rollout.abandoned)
        return Group(
            position=position,
            prompt=index,
            task=self._order.label(index),
            samples=tuple(samples),
            failures=tuple(failures),
            abandoned=abandoned,
            reused=record.reused,
            resampled=record.resampled,
        )

    async def _scored(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> tuple[list[Sample], list[str]]:
        """The samples of a prompt's rollouts, and the reasons of failed rollouts."""
        failures = [rollout.reason for rollout in rollouts if rollout.episode is None and not rollout.abandoned]
        ended = [rollout for rollout in rollouts if rollout.episode is not None]
        answers = [completion_of(rollout.episode, self._whole_answers) for rollout in ended if rollout.episode]
        scores = await self._calls.rewards(prompt, answers) if ended else []
        outcomes = [rollout.scored(score) for rollout, score in zip(ended, scores, strict=True)]
        failures += [outcome for outcome in outcomes if isinstance(outcome, str)]
        return [outcome for outcome in outcomes if isinstance(outcome, Sample)], failures
