"""The actor of a run that only evaluates: servers load the model from disk, and each evaluation set runs once.

Owns such an attempt: it waits for the servers, evaluates the sets that no earlier attempt evaluated, writes
`evaluation.json` and publishes the end. Promises that logged results are not measured again, and that a superseded
attempt logs nothing. Must not know the origin of the model.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from pipeline.checkpoints import Fence, root_of
from pipeline.config.evaluation_keys import BUILTIN_SET
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.errors import DeadlineError
from pipeline.roles.benchmark_command import run_command
from pipeline.roles.event_loop import REPORT_SECONDS, beat, open_in_thread
from pipeline.roles.inference import is_healthy
from pipeline.roles.role_context import RoleContext
from pipeline.roles.sample_quota import sample_store_for
from pipeline.rollout.eval_rollouts import Evaluation, accuracy_text
from pipeline.rollout.sample_store import EVAL
from pipeline.rollout.server_pool import InferenceClient
from pipeline.run.metrics_log import Console, MetricRecord, MetricSinks, read_rows
from pipeline.run.run_documents import SubmittedJob
from pipeline.train.loop.evaluations import metrics_of, results_in
from pipeline.transport.eval_records import EvalRequest
from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT, retry_transient
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)
JOB = "rl"
"""The job that the logged steps belong to."""


class Evaluator:
    """One attempt of a run that only evaluates."""

    def __init__(self, context: RoleContext) -> None:
        self._context, self._config = context, context.config
        self._endpoints = [placement.endpoint for placement in context.world.of_role("inference")]
        self._fence = Fence(root_of(context.config, context.run, context.paths.run_id), context.paths.attempt)

    async def work(self) -> None:
        """Evaluate the remaining sets, then publish the end; `DeadlineError` if a server does not become healthy."""
        submitted = shared_files.read_document(self._context.run.job, SubmittedJob)
        self._fence.claim(submitted.job if submitted else "")
        self._fence.keep(())  # it saves no checkpoints
        alive = asyncio.create_task(beat())
        try:
            async with AsyncExitStack() as opened:
                evaluation = await self._open(opened)
                self._context.announce("ready", "waiting for the servers")
                await self._servers_are_up()
                await self._evaluate(evaluation)
                await run_command(self._context, self._endpoints)
        finally:
            alive.cancel()
        name, events = self._context.placement.name, self._context.events
        await asyncio.to_thread(
            retry_transient,
            "the end to be published",
            partial(events.publish, "training_finished", name),
            FS_OUTAGE_TIMEOUT,
        )

    async def _open(self, opened: AsyncExitStack) -> Evaluation:
        config, world = self._config, self._context.world
        task, chat = load_task(config.task, config.seed), ChatTokenizer(Path(config.model.path))
        await opened.enter_async_context(aclosing(task))
        setup = Setup(config.task, config.seed, Path(config.model.path), config.reward)
        calls = await opened.enter_async_context(WorkerPool(setup, config.cluster.startup_seconds))
        client = InferenceClient(
            self._endpoints,
            world.password,
            config.rollout.request_seconds,
            max_tokens_per_request=config.rollout.max_tokens_per_request,
            vocabulary=chat.vocabulary,
            fixed=True,
        )
        await opened.enter_async_context(client)
        for endpoint in self._endpoints:
            client.update(endpoint, config.evaluation.step)
        store = sample_store_for(self._context, EVAL)
        await opened.enter_async_context(open_in_thread(store))
        return Evaluation(task, calls, chat, client, config, store.add)

    async def _servers_are_up(self) -> None:
        """Wait for the servers, so that no set's deadline runs while they load their weights."""
        deadline = Deadline("the servers to load the model", 2 * self._config.cluster.startup_seconds)
        for placement in self._context.world.of_role("inference"):
            while not await asyncio.to_thread(
                is_healthy, placement.address, placement.ports[0], self._context.world.password
            ):
                if deadline.passed:
                    raise DeadlineError("the servers to load the model", deadline.seconds, placement.name)
                await asyncio.sleep(REPORT_SECONDS)

    async def _evaluate(self, evaluation: Evaluation) -> None:
        """Log each remaining set, then write the results of all sets."""
        run, step = self._context.run, self._config.evaluation.step
        # Sets that an earlier attempt has logged at this step are skipped.
        done = {name for name, version in results_in(read_rows(run.metrics)) if version == step}
        async with report_evaluations(self._context, evaluation), AsyncExitStack() as opened:
            sinks = opened.enter_context(
                MetricSinks(run.metrics, self._context.paths.attempt, [Console()], check=self._fence.check)
            )
            for name in evaluation.names:
                if name in done:
                    continue
                request = EvalRequest(id=f"{self._context.paths.attempt}:{name}", policy_version=step, set=name)
                result = await evaluation.run(request)
                log.info("accuracy on %s: %s", name or BUILTIN_SET, accuracy_text(result))
                sinks.log("eval", JOB, step, metrics_of(result), eval_set=name)
                sinks.flush()
                self._context.paths.checkpointed.touch()
        results = rows_of_step(read_rows(run.metrics), step)
        document = {"model": self._config.model.path, "step": step, "sets": results}
        shared_files.write_atomic(run.evaluation, msgspec.json.format(msgspec.json.encode(document)) + b"\n")


@asynccontextmanager
async def report_evaluations(context: RoleContext, evaluation: Evaluation) -> AsyncIterator[None]:
    """Report the progress of the evaluation repeatedly while the block runs."""
    ended = asyncio.Event()

    async def report() -> None:
        while not ended.is_set():
            await asyncio.to_thread(context.report, "ready", evaluation.detail, **evaluation.numbers())
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), REPORT_SECONDS)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        ended.set()  # a report that is being written must not come after the next one
        await task


def rows_of_step(rows: Iterable[MetricRecord], step: int) -> dict[str, dict[str, float | None]]:
    """The results of each set at a step, by set name and metric name."""
    results = {}
    for row in rows:
        if row["kind"] == "eval" and row["step"] == step:
            name = row.get("set", "")
            prefix = f"eval/{name}/" if name else "eval/"
            numbers = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
            results[name or BUILTIN_SET] = numbers
    return results
