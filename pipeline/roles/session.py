"""One attempt of the trainer, from its newest commit to `training_finished`.

Owns the wiring of the controller: which jobs run on which dispatch, with which checkpoints and sinks, and with which
other roles if the run has rollouts (`peers`); and the order of the end: last commit, exported model, weight groups torn
down, device memory given back, and only then the event. Must not know losses, ranks or how weights travel.
"""

import logging
import signal
from collections.abc import Mapping
from contextlib import ExitStack

from pipeline.roles.context import RoleContext
from pipeline.roles.peers import Peers
from pipeline.rundir.events import Listener
from pipeline.rundir.metrics import Console, MetricSinks
from pipeline.system import heartbeat
from pipeline.system.outages import OUTAGE_SECONDS, insist
from pipeline.tracking.sinks import tracking_sinks
from pipeline.training.batches import Interrupted
from pipeline.training.commits import Commits, JobPosition
from pipeline.training.demonstrations import TaskDemonstrations
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.dispatch.release import release
from pipeline.training.jobs import Job, SftJob, write_job
from pipeline.training.runner import Algorithm, Runner, tells_more
from pipeline.training.sft import SupervisedFineTuning
from pipeline.training.speed import machine_of

log = logging.getLogger(__name__)


class Session:
    """The controller's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: Dispatch) -> None:
        self._context, self._dispatch, self._config = context, dispatch, context.config
        self._commits = Commits(context.paths, context.config, dispatch)
        self._listener = Listener(context.events, ranks=1 + max(place.rank for place in context.world.placements))
        self._peers: Peers | None = None

    def run(self) -> None:
        """Run what is left of the run's jobs; returns without `training_finished` when the attempt is ending."""
        position = self._commits.restore()
        with ExitStack() as opened:
            self._open(opened)
            opened.push(self._finish_commits)  # while those whom it tells are still open
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on events say when to commit and end
                self._context.announce("ready", "connected")
                if self._peers:
                    self._peers.give_up(self._commits.covered)
                self._run_jobs(position)
                self._commits.export()
            except Interrupted as reason:
                log.info("%s; what is done is committed", reason)
                return
        release(self._dispatch)
        by = self._context.placement.name
        insist("the end to be told", lambda: self._context.events.publish("training_finished", by), OUTAGE_SECONDS)

    def _open(self, opened: ExitStack) -> None:
        """Connect to everything the controller talks to; `opened` closes it in the opposite order."""
        config, paths = self._config, self._context.paths
        tracking, check = tracking_sinks(config, paths), self._commits.fence.check
        sinks = MetricSinks(self._context.run.metrics, paths.attempt, [Console(), *tracking], check=check)
        self._sinks = opened.enter_context(sinks)
        if config.has_rollouts:
            ledger = self._commits.ledger
            self._peers = Peers(self._context, self._dispatch, ledger, opened, self._pulse, self._note_evaluation)
            self._commits.on_durable = self._peers.give_up

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
        assert self._peers, "a job of RL belongs to a run with rollouts"
        return self._peers.algorithm(job)

    @property
    def whole(self) -> bool:
        """See `runner.Book`."""
        return not self._dispatch.broken

    @property
    def crowded(self) -> bool:
        """See `runner.Book`."""
        return self._peers is not None and self._peers.crowded

    def commit(self, job: Job, done: int, wait: bool) -> None:
        """See `runner.Book`."""
        self._sinks.flush()
        covered = self._peers.begin_commit() if self._peers else ()
        self._commits.commit(job, done, covered, wait)

    def _finish_commits(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Wait for the commit that is under way; what it failed with must not hide an `error` that came before."""
        try:
            self._commits.finish()
        except Exception as second:
            if tells_more(second, error):
                raise
            log.error("the commit that was under way failed too: %s", second)

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """See `runner.Book`."""
        idle = self._peers.idle_fractions() if self._peers else {}
        self._sinks.log("train", job.name, step, {**metrics, **idle})
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
