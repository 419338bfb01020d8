"""The actor role: samples groups and publishes them; runs evaluations, or only evaluates (`evaluator`).

Owns the wiring and the life of the process: ready when it has connected to the streams and loaded the task; idle until
the trainer posts its first weights; stopped only by SIGINT, which its agent sends when the attempt ends, never by a
count. A task that never succeeds ends it with exit code 1 and the reason as the last line of its log. Any other failure
does the same, with a traceback.
"""

import asyncio
import logging
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

from pipeline.config.routing_shape import routing_shape
from pipeline.environments import Task, load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.errors import RollcallError, one_line
from pipeline.roles import SERVICES, RoleCommand
from pipeline.roles.event_loop import REPORT_SECONDS, beat, open_in_thread, work_until
from pipeline.roles.role_context import RoleContext
from pipeline.roles.sample_quota import sample_store_for
from pipeline.rollout.episode_journal import EpisodeJournal
from pipeline.rollout.eval_rollouts import Evaluation, accuracy_text
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.rollout.issue_loop import IssueLoop
from pipeline.rollout.sample_store import EVAL, SampleStore
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport import AsyncStreams, connect
from pipeline.transport.eval_records import EvalRequest
from pipeline.transport.sample_records import TASK_CALLS
from pipeline.transport.shared_state import SharedState
from pipeline.utils import heartbeat
from pipeline.utils.connection_limits import raise_open_files

log = logging.getLogger(__name__)

READ_SECONDS = 60.0


def launch(context: RoleContext) -> RoleCommand:
    """One process with one busy thread, and below it the worker processes of the task."""
    argv = (sys.executable, "-P", "-m", "pipeline.roles.actor", *context.arguments())
    env = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
    return RoleCommand(argv=argv, env=env, has_heartbeat=1, ready=context.is_ready, stage=SERVICES)


class Actor:
    """The components of the role, and the loops that connect them."""

    def __init__(
        self,
        context: RoleContext,
        task: Task,
        calls: WorkerPool,
        chat: ChatTokenizer,
        streams: AsyncStreams,
        board: SharedState,
        client: InferenceClient,
        store: SampleStore,
        journal: EpisodeJournal,
    ) -> None:
        config = context.config
        builder = GroupBuilder(task, calls, chat, client, config, journal, context.run)
        self._context, self._streams, self._client, self._calls = context, streams, client, calls
        self._generation = IssueLoop(streams, board, builder, client, config)
        self._evaluation = Evaluation(task, calls, chat, client, config, store.add)

    async def work(self) -> None:
        """Generate, evaluate and report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._generation.run())
            tasks.create_task(self._answer())
            tasks.create_task(self._report())
            tasks.create_task(beat())

    async def _answer(self) -> None:
        """Run evaluation requests, one at a time. Requests of an earlier attempt name weights that are gone."""
        own_prefix = f"{self._context.paths.attempt}:"
        requests = await self._streams.reader("eval_requests", EvalRequest, "actor")
        while True:
            for entry in await self._streams.read(requests, 1, READ_SECONDS):
                if not entry.record.id.startswith(own_prefix):
                    log.info("evaluation %s is of an earlier attempt; not answered", entry.record.id)
                    await self._streams.acknowledge(requests, [entry.id])
                    continue
                result = await self._evaluation.run(entry.record)
                named = f" on {result.set}" if result.set else ""
                log.info("held-out accuracy of weights %d%s: %s", result.policy_version, named, accuracy_text(result))
                await self._streams.publish("eval_results", result, acknowledging=(requests, [entry.id]))

    async def _report(self) -> None:
        while True:
            numbers = self._generation.numbers() | self._client.numbers() | self._evaluation.numbers()
            numbers[TASK_CALLS] = self._calls.finished_calls
            await asyncio.to_thread(self._context.report, "ready", self._evaluation.detail, **numbers)
            await asyncio.sleep(REPORT_SECONDS)


async def run(context: RoleContext, stop: asyncio.Event) -> None:
    """Run the actor until `stop` is set; `TaskError` (in a group) when the task never succeeds."""
    config, world = context.config, context.world
    task, chat = load_task(config.task, config.seed), ChatTokenizer(Path(config.model.path))
    streams = await asyncio.to_thread(connect, context)
    store, journal = sample_store_for(context, EVAL), EpisodeJournal(context.run.episodes, config.rollout.journal_bytes)
    async with (
        aclosing(task),
        open_in_thread(store),
        open_in_thread(journal),
        AsyncStreams(streams) as asynchronous,
        WorkerPool(
            Setup(config.task, config.seed, Path(config.model.path), config.reward), config.cluster.startup_seconds
        ) as calls,
        InferenceClient(
            [placement.endpoint for placement in world.of_role("inference")],
            world.password,
            config.rollout.request_seconds,
            max_tokens_per_request=config.rollout.max_tokens_per_request,
            max_lag=config.training.max_lag,
            server_seconds=2 * config.cluster.startup_seconds,
            vocabulary=chat.vocabulary,
            routing=routing_shape(config),
            keeps_prefixes=not config.inference.reset_kv_cache_on_update,
            watches_load=config.rollout.adaptive_concurrency,
        ) as client,
    ):
        await work_until(
            stop, Actor(context, task, calls, chat, asynchronous, SharedState(streams), client, store, journal).work()
        )


async def _run_until_signal(context: RoleContext) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    if context.config.evaluation.only:
        from pipeline.roles.evaluator import Evaluator

        await work_until(stop, Evaluator(context).work())
        return
    await run(context, stop)


def main(arguments: list[str]) -> None:
    """The role's process."""
    heartbeat.start()
    raise_open_files()  # an episode of an agent needs four, and thousands may be in flight
    context = RoleContext.from_arguments(arguments)
    context.configure_logs()
    context.report("starting")
    context.wait_for_debugger()
    code = 1
    try:
        asyncio.run(_run_until_signal(context))
        context.report("stopped")
        code = 0
    except BaseException as error:  # noqa: BLE001 the end of the process: any error is reported
        _log_error(context, _first(error))
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)  # a wait that hangs in a thread must not keep the process


def _log_error(context: RoleContext, error: BaseException) -> None:
    """Log and report the failure; errors other than Rollcall's with type and traceback."""
    is_expected = isinstance(error, RollcallError)
    text = str(error) if is_expected else one_line(error)
    log.error("%s", text, exc_info=None if is_expected else error)
    context.report_failure(error, text)


def _first(error: BaseException) -> BaseException:
    """The first error within nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main(sys.argv[1:])
