"""Conversations that wait for the reward model, and the process that scores them.

Owns the batches, the deadline of each, and the replacement of the process. Promises a score or one line with the reason
for each conversation; that waiting for other batches never times out; that a batch whose process ended, or was killed,
is scored once more by a new process; and that a batch which exceeds the deadline costs its samples and its process
only. Used by one event loop. Must not know weights and other rewards (`pipeline.environments.rewards`).

    queue = RewardModelQueue(config.reward.model, startup_seconds=300)
    await queue.ready()
    scores = await queue.score(prompt, completions)
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from pipeline.config.task_keys import RewardModelConfig
from pipeline.environments.guarded_call import call_guarded
from pipeline.environments.reward_functions import PartialScore
from pipeline.environments.reward_model_process import Chat
from pipeline.environments.task_protocol import Completion, Prompt
from pipeline.environments.worker_process import WorkerProcess, frame
from pipeline.errors import TaskError

log = logging.getLogger(__name__)

TRIES = 2
"""Processes that a batch may end."""
START_PAUSES = (0.0, 1.0, 5.0)
Waiting = tuple[Chat, asyncio.Future[float | str]]
"""A conversation, and the future of its score or of the reason why it has none."""


class RewardModelProcess(WorkerProcess):
    """The process with the model."""

    def __init__(self) -> None:
        super().__init__("pipeline.environments.reward_model_process", "the reward model's process", {})

    async def exchange(self, call: bytes, seconds: float) -> list[float | str]:
        """The scores of a batch; `TimeoutError` after `seconds`, `ConnectionError` with the reason if the process
        ends."""
        self.broken = True  # until the reply is read: a cancelled call leaves it behind
        try:
            self._writer.write(call)
            async with asyncio.timeout(seconds):
                scores: list[float | str] = await self._reply()
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise ConnectionError(await self._end_of_process()) from None
        self.broken = False
        return scores


class RewardModelQueue:
    """Scores conversations in batches of up to `reward.model.batch_size`, in order of arrival."""

    def __init__(self, config: RewardModelConfig, startup_seconds: float) -> None:
        """Start the process, which loads the model for at most `startup_seconds`."""
        self._config, self._startup = config, startup_seconds
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self._process = RewardModelProcess()
        self._work: asyncio.Task[None] | None = None
        self._failure: TaskError | None = None

    async def ready(self) -> None:
        """Wait for the model, then begin to score; `TaskError` or `DeadlineError` if it cannot be loaded."""
        await self._process.ready(self._config, self._startup)
        self._work = asyncio.create_task(self._score_batches())

    async def close(self) -> None:
        """End the process."""
        if self._work is not None:
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work
        await self._process.ended()

    def pass_on_print(self) -> None:
        """Write some of the process's output to this process's log."""
        self._process.pass_on_print()

    async def score(self, prompt: Prompt, answers: Sequence[Completion]) -> list[PartialScore | str]:
        """The score of each answer, or why there is none; `TaskError` if the process cannot be started again."""
        if self._failure:
            raise self._failure
        futures: list[asyncio.Future[float | str]] = []
        for answer in answers:
            futures.append(asyncio.get_running_loop().create_future())
            chat = Chat((*prompt.messages, *answer.conversation), tuple(prompt.tools))
            self._waiting.put_nowait((chat, futures[-1]))
        scores = await asyncio.gather(*futures)
        return [one if isinstance(one, str) else PartialScore(one) for one in scores]

    async def _score_batches(self) -> None:
        while True:
            batch = await self._next_batch()
            try:
                scores = await self._scores([chat for chat, _ in batch])
                for (_, future), score in zip(batch, scores, strict=True):
                    if not future.done():  # its group was cancelled meanwhile
                        future.set_result(score)
            except Exception as error:  # noqa: BLE001 the waiting calls get the error
                self._fail(error if isinstance(error, TaskError) else TaskError(f"reward model: {error!r}"), batch)
                return

    async def _next_batch(self) -> list[Waiting]:
        """The conversations that wait, at least one and at most a batch, without those of cancelled groups."""
        batch: list[Waiting] = []
        while not batch or (len(batch) < self._config.batch_size and not self._waiting.empty()):
            chat, future = await self._waiting.get()
            if not future.done():
                batch.append((chat, future))
        return batch

    def _fail(self, error: TaskError, batch: Sequence[Waiting]) -> None:
        """Give every waiting call, and all later ones, the error."""
        self._failure = error
        left = list(batch)
        while not self._waiting.empty():
            left.append(self._waiting.get_nowait())
        for _, future in left:
            if not future.done():
                future.set_exception(error)

    async def _scores(self, chats: Sequence[Chat]) -> list[float | str]:
        call = call_guarded("prompt cannot be pickled", lambda: frame(list(chats)))
        if isinstance(call, str):
            return [call] * len(chats)
        reason = ""
        for _ in range(TRIES):
            await self._replace_ended()
            try:
                return await self._process.exchange(call, self._config.seconds)
            except TimeoutError:
                reason = f"reward model took too long: more than reward.model.seconds={self._config.seconds:g}"
                break
            except ConnectionError as error:
                reason = f"reward model ended its process: {error}"
                log.warning("%s", reason)
        return [reason] * len(chats)

    async def _replace_ended(self) -> None:
        """Start a new process unless there is a usable one; `TaskError` if all attempts fail."""
        if self._process.alive and not self._process.broken:
            return
        failure: Exception | None = None
        for pause in START_PAUSES:
            try:
                await self._process.ended()
                await asyncio.sleep(pause)
                self._process = RewardModelProcess()
                await self._process.ready(self._config, self._startup)
                return
            except Exception as error:  # noqa: BLE001 the waiting calls get the error
                log.warning("the reward model could not be loaded: %s", error)
                failure = error
        raise TaskError(f"{type(failure).__name__}: {failure}")
