"""Worker processes for the calls of a task.

Owns the number of workers, the deadline of each call, and the end of a worker that misses it or crashes. Promises that
a failing call costs at most its item, which gets the reason, and its worker; that a worker is ended with every process
that it started; that calls which wait for a worker are not at fault and never time out; and that the output of workers
is passed on at a bounded rate. Workers exit with this process. Knows nothing of servers or groups.

The pool starts with one worker. A call that has waited `GROW_SECONDS` for a worker starts another, up to
`task.processes`: cheap rewards need no more than one.

    async with WorkerPool(Setup(config.task, config.seed, model), startup_seconds=300) as pool:
        rendered = await pool.prompt(7)
        scores = await pool.rewards(rendered.prompt, [Completion("4"), Completion("5")])
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from pipeline.environments.guarded_call import call_guarded
from pipeline.environments.reward_functions import PartialScore
from pipeline.environments.reward_model_queue import RewardModelQueue
from pipeline.environments.rewards import Mixture, Score
from pipeline.environments.task_calls import RenderedPrompt, ToolResult
from pipeline.environments.task_protocol import Completion, Prompt
from pipeline.environments.task_worker import Call, Setup
from pipeline.environments.worker_process import WorkerProcess, frame
from pipeline.errors import TaskError

log = logging.getLogger(__name__)

GROW_SECONDS = 1.0
START_PAUSES = (0.0, 1.0, 5.0)
MAX_CHILDREN = 256
PRINT_SECONDS = 0.25


class Worker(WorkerProcess):
    """A process of the task, which answers its calls."""

    def __init__(self) -> None:
        """Start the process; it is usable after `ready`."""
        # A fixed hash seed gives sets the same order in all workers, so a task draws the same from one everywhere.
        super().__init__("pipeline.environments.task_worker", "a process of the task", {"PYTHONHASHSEED": "0"})

    @property
    def has_too_many_children(self) -> bool:
        """Whether it has more than `MAX_CHILDREN` child processes, running or zombies: a task leaks them in its
        calls."""
        pid = self._process.pid
        with suppress(OSError):
            return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) > MAX_CHILDREN
        return False

    async def answer(self, what: str, call: bytes, items: int, seconds: float) -> list[Any]:
        """A reply per item, or up to the item that broke the worker: the last reply is then the reason."""
        replies: list[Any] = []
        self.broken = True  # until all replies are read: a cancelled call leaves replies behind
        try:
            self._writer.write(call)
            async with asyncio.timeout(None if math.isinf(seconds) else seconds) as limit:
                for _ in range(items):
                    replies.append(await self._reply())
                    # The deadline bounds one item, so each reply restarts it.
                    if limit.when() is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + seconds)
        except TimeoutError:
            return [*replies, f"{what} took too long: more than task.seconds={seconds:g}"]
        except (EOFError, OSError):
            return [*replies, f"{what} ended its process: {await self._end_of_process()}"]
        self.broken = False
        return replies


class WorkerPool:
    """The workers of one task, as `pipeline.environments.task_calls.TaskCalls`; used by one event loop."""

    def __init__(self, setup: Setup, startup_seconds: float) -> None:
        """`startup_seconds`: the timeout of a worker that loads the task. `finished_calls` counts the items of calls
        that have a reply, also the reason of a failure."""
        self._setup, self._startup = setup, startup_seconds
        self._mixture = Mixture(setup.reward)
        self._model: RewardModelQueue | None = None
        self._free: asyncio.LifoQueue[Worker | TaskError] = asyncio.LifoQueue()
        self._workers: set[Worker] = set()
        self._starting = False
        self._background: set[asyncio.Task[None]] = set()
        self.finished_calls = 0

    async def __aenter__(self) -> Self:
        model = self._setup.reward.model
        try:
            if model.path:
                self._model = RewardModelQueue(model, self._startup)  # loads while the first worker starts
            await self._add()
            if self._model is not None:
                await self._model.ready()
        except BaseException:
            await self._close()
            raise
        self._do(self._pass_on_prints())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def prompt(self, index: int) -> RenderedPrompt | str:
        """Training prompt `index`, or why there is none."""
        replies: list[RenderedPrompt | str] = await self._replies("prompt", "prompt", (), (index,))
        return replies[0]

    async def render(self, prompt: Prompt) -> RenderedPrompt | str:
        """A prompt with its text, or why there is none."""
        replies: list[RenderedPrompt | str] = await self._replies("prompt", "render", (), (prompt,))
        return replies[0]

    async def rewards(self, prompt: Prompt, answers: Sequence[Completion]) -> list[Score | str]:
        """The reward of each answer, or why it has none. Each function is called separately, with a separate
        deadline."""
        calls = [self._parts(which, prompt, tuple(answers)) for which in range(len(self._mixture.names))]
        columns = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        return [self._mixture.combine(parts) for parts in zip(*columns, strict=True)]

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> ToolResult | str:
        """The result of one of the task's tools, or why there is none."""
        replies: list[ToolResult | str] = await self._replies(f"tool {name}", "use", (prompt, name), (arguments,))
        return replies[0]

    async def run(
        self, prompt: Prompt, name: str, arguments: Any, working: AbstractContextManager[None]
    ) -> ToolResult | str:
        """The result of a tool without a deadline. Cancelling this ends the worker with all its child processes."""
        call = call_guarded("prompt cannot be pickled", lambda: frame(Call("use", (prompt, name), (arguments,))))
        if isinstance(call, str):
            return call
        async with self._borrowed() as worker:
            with working:
                (result,) = await worker.answer(f"tool {name}", call, 1, math.inf)
        self.finished_calls += 1
        return cast(ToolResult | str, result)

    async def _parts(self, which: int, prompt: Prompt, answers: tuple[Completion, ...]) -> list[PartialScore | str]:
        """The score of each answer by part number `which` of the reward."""
        if self._mixture.is_model(which):
            assert self._model is not None
            scores = await self._model.score(prompt, answers)
            self.finished_calls += len(answers)
            return scores
        title, shared = self._mixture.title(which), (which, prompt)
        if not self._mixture.whole_groups:
            return await self._replies(title, "score", shared, answers)
        (reply,) = await self._replies(title, "score_all", shared, (answers,))
        return [reply] * len(answers) if isinstance(reply, str) else reply

    async def _replies(self, what: str, method: str, shared: tuple[Any, ...], items: tuple[Any, ...]) -> list[Any]:
        """A reply per item. Items after one that breaks its worker go to another worker."""
        replies: list[Any] = []
        while left := items[len(replies) :]:
            call = call_guarded("prompt cannot be pickled", lambda: frame(Call(method, shared, left)))
            if isinstance(call, str):
                return [call] * len(items)
            async with self._borrowed() as worker:
                answered = await worker.answer(what, call, len(left), self._setup.task.seconds)
            replies += answered
            self.finished_calls += len(answered)
        return replies

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[Worker]:
        worker = await self._take()
        try:
            yield worker
        finally:
            if worker.broken or worker.has_too_many_children:
                self._do(self._replace(worker))
            else:
                self._free.put_nowait(worker)

    async def _take(self) -> Worker:
        """A free worker, or `TaskError` when there is none any more and none can be started."""
        while True:
            try:
                async with asyncio.timeout(GROW_SECONDS):
                    worker = await self._free.get()
            except TimeoutError:
                self._grow()
                continue
            if isinstance(worker, TaskError):
                self._free.put_nowait(worker)
                raise worker
            if worker.alive:
                return worker
            self._do(self._replace(worker))  # it exited between calls, so no sample is at fault

    async def _replace(self, worker: Worker) -> None:
        await self._ended(worker)
        self._grow()

    def _grow(self) -> None:
        """Start one more worker, unless one starts already or there are enough."""
        if not self._starting and len(self._workers) < self._setup.task.processes:
            self._starting = True
            self._do(self._start())

    async def _start(self) -> None:
        """Start one more worker. If all attempts fail and no worker is left, every waiting call gets the error."""
        try:
            for pause in START_PAUSES:
                await asyncio.sleep(pause)
                try:
                    await self._add()
                    return
                except Exception as error:  # noqa: BLE001 a background task: waiting calls get the error
                    log.warning("a process of the task could not be started: %s", error)
                    failure = TaskError(f"{type(error).__name__}: {error}")
        finally:
            self._starting = False
        if not self._workers:
            self._free.put_nowait(failure)

    async def _add(self) -> None:
        worker = Worker()
        self._workers.add(worker)
        try:
            await worker.ready(self._setup, self._startup)
        except BaseException:
            await self._ended(worker)
            raise
        self._free.put_nowait(worker)

    async def _ended(self, worker: Worker) -> None:
        """End a worker once, and completely even if the caller is cancelled."""
        await worker.ended()
        self._workers.discard(worker)

    async def _pass_on_prints(self) -> None:
        """Write output of workers to this process's log at a bounded rate. A worker that prints more blocks in its
        writes, and misses the deadline of its call."""

        while True:
            await asyncio.sleep(PRINT_SECONDS)
            for worker in self._workers:
                worker.pass_on_print()
            if self._model is not None:
                self._model.pass_on_print()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _close(self) -> None:
        for task in (background := list(self._background)):
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        ends = [self._ended(worker) for worker in list(self._workers)]
        await asyncio.gather(*ends, *([self._model.close()] if self._model else []))
