"""One attempt of the trainer, from its newest commit to `training_finished`.

Owns the wiring of the controller: which jobs run on which dispatch, with which streams, servers, checkpoints and sinks,
and the order of the end: last commit, exported model, weight groups torn down, device memory given back, and only then
the event. Must not know losses, ranks or how weights travel.
"""

import logging
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

from pipeline.roles.context import RoleContext
from pipeline.rundir.events import Listener
from pipeline.rundir.metrics import Console, MetricSinks, read_rows
from pipeline.streams import connect
from pipeline.streams.board import Board
from pipeline.system import heartbeat
from pipeline.system.outages import OUTAGE_SECONDS, insist
from pipeline.tracking.sinks import tracking_sinks
from pipeline.training.batches import GroupBatches, Interrupted
from pipeline.training.commits import Commits, JobPosition
from pipeline.training.demonstrations import TaskDemonstrations
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.dispatch.release import release
from pipeline.training.evaluation import Evaluations
from pipeline.training.jobs import Job, SftJob, write_job
from pipeline.training.publisher import Publisher
from pipeline.training.rl import ReinforcementLearning
from pipeline.training.runner import Algorithm, Runner, tells_more
from pipeline.training.sft import SupervisedFineTuning
from pipeline.training.speed import machine_of
from pipeline.weights.link import MeetingPoint
from pipeline.weights.sender import CPU, WeightSender

log = logging.getLogger(__name__)


class Session:
    """The controller's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: Dispatch) -> None:
        self._context, self._dispatch, self._config = context, dispatch, context.config
        self._actor = replace(context, placement=context.world.of_role("actor")[0])
        self._commits = Commits(context.paths, context.config, dispatch)
        self._listener = Listener(context.events, ranks=1 + max(place.rank for place in context.world.placements))

    def run(self) -> None:
        """Run what is left of the run's jobs; returns without `training_finished` when the attempt is ending."""
        position = self._commits.restore()
        with ExitStack() as opened:
            self._open(opened)
            self._commits.on_durable = self._give_up
            opened.push(self._finish_commits)  # while those whom it tells are still open
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on events say when to commit and end
                self._context.announce("ready", "connected")
                self._give_up(self._commits.covered)
                self._run_jobs(position)
                self._commits.export()
            except Interrupted as reason:
                log.info("%s; what is done is committed", reason)
                return
        release(self._dispatch)
        by = self._context.placement.name
        insist("the end to be told", lambda: self._context.events.publish("training_finished", by), OUTAGE_SECONDS)

    def _open(self, opened: ExitStack) -> None:
        """Connect to everything the controller talks to; `opened` closes it, the weight groups first."""
        config, context = self._config, self._context
        paths, run = context.paths, context.run
        tracking = tracking_sinks(config, paths)
        sinks = MetricSinks(run.metrics, paths.attempt, [Console(), *tracking], check=self._commits.fence.check)
        self._sinks = opened.enter_context(sinks)
        self._streams = opened.enter_context(connect(context))
        self._board = Board(self._streams)
        self._publisher = Publisher(self._dispatch, opened.enter_context(self._sender()), self._pulse)
        ledger, vocabulary = self._commits.ledger, self._dispatch.models["policy"].vocabulary
        self._batches = GroupBatches(self._streams, self._board, ledger, config, self._pulse, vocabulary)
        self._evaluations = Evaluations(
            self._streams,
            context.paths.attempt,
            config.training.data_seconds,
            [row["step"] for row in read_rows(run.metrics) if row["kind"] == "eval"],
            self._note_evaluation,
            self._pulse,
        )

    def _sender(self) -> WeightSender:
        context, config = self._context, self._config
        servers = [placement.endpoint for placement in context.world.of_role("inference")]
        place = context.world.of_role("trainer")[0]
        meeting = MeetingPoint(place.address, place.ports[1], context.world.password)
        patience, told = config.cluster.startup_seconds, self._board.post_server
        device = self._dispatch.device if config.weights_backend == "nccl" else CPU
        return WeightSender(servers, meeting, config.inference, patience, told, config.model.lora, device)

    def _run_jobs(self, position: JobPosition) -> None:
        done = position.done
        for job in (position.job, *position.rest):
            write_job(self._context.run.training_job(job.name), job)
            machine = machine_of(self._config, job, self._dispatch.models["policy"].flops_per_token)
            Runner(self, self._config.training.checkpoint_every, machine).run(self._algorithm(job), done)
            done = 0

    def _algorithm(self, job: Job) -> Algorithm:
        if isinstance(job, SftJob):
            with heartbeat.during("making the task", self._config.cluster.startup_seconds):
                demonstrate, level = TaskDemonstrations(self._config), self._config.training.metrics
            return SupervisedFineTuning(job, self._dispatch, demonstrate, self._pulse, level)
        return ReinforcementLearning(
            job, self._config, self._dispatch, self._batches, self._publisher, self._evaluations
        )

    @property
    def whole(self) -> bool:
        """See `runner.Book`."""
        return not self._dispatch.broken

    @property
    def crowded(self) -> bool:
        """See `runner.Book`."""
        return self._batches.crowded

    def commit(self, job: Job, done: int, wait: bool) -> None:
        """See `runner.Book`."""
        self._sinks.flush()
        self._commits.commit(job, done, self._batches.begin_commit(), wait)

    def _finish_commits(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Wait for the commit that is under way; what it failed with must not hide an `error` that came before."""
        try:
            self._commits.finish()
        except Exception as second:
            if tells_more(second, error):
                raise
            log.error("the commit that was under way failed too: %s", second)

    def _give_up(self, covered: tuple[str, ...]) -> None:
        """What a durable commit covers; the board needs it before it is acknowledged."""
        self._board.post_ledger(self._commits.ledger.snapshot())
        self._batches.acknowledge(covered)

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """See `runner.Book`."""
        self._sinks.log("train", job.name, step, {**metrics, **idle_fractions(self._actor)})
        self._context.report("ready", f"{job.name} step {step} of {job.steps}")
        self._commits.collect()

    def _note_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self._sinks.log("eval", "rl", version, metrics)

    def _pulse(self) -> None:
        """Called while the controller waits between two operations: show the ranks that it lives, and acknowledge the
        stream entries that a commit covers once it is durable.

        Raises `Interrupted` when the attempt is ending; that comes first, since the last commit makes up for one that
        failed. Raises `CheckpointError` for a commit that failed, or that a later attempt's right to write refused.
        """
        self._dispatch.idle()
        heard = self._listener.heard()
        ending = heard.get("failed") or heard.get("draining")
        if ending is not None:
            raise Interrupted(f"{ending.name} by {ending.by}")
        self._commits.collect()


def idle_fractions(actor: RoleContext) -> dict[str, float]:
    """How idle the servers and the actor were in the last second, as the actor reported: 0 … 1 each."""
    status = actor.status()
    numbers = status.numbers if status is not None else {}
    servers = [value for name, value in numbers.items() if name.startswith("idle/")]
    found = {"idle/actor": numbers.get("gate_blocked"), "idle/servers": fmean(servers) if servers else None}
    return {name: value for name, value in found.items() if value is not None}
