"""The agent: one on every rank, and what the scheduler's signals are for.

Reads like the life of an attempt: meet the other ranks, learn the world, run this rank's roles, come down. Promises
that nothing it started outlives it, and that the reason of a failure is on disk before it returns.
"""

import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline import files, process
from pipeline.checkpoints import Fence, root_of
from pipeline.config import RunConfig
from pipeline.errors import DeadlineError, RendezvousError, RollcallError
from pipeline.events import Events
from pipeline.failure import FirstFailure
from pipeline.paths import AttemptPaths, RunPaths
from pipeline.plan import Card, World, make_plan
from pipeline.records import Finished
from pipeline.roles.context import RoleContext, read_config
from pipeline.waiting import Clock, wait_for
from slurm import runs
from slurm.alive import SignsOfLife, leave, lost_ranks
from slurm.beacon import Beacon
from slurm.directory import FileDirectory
from slurm.environment import Environment
from slurm.preflight import Needs, boot_id, find_gpus, free_memory, preflight
from slurm.rendezvous import meet
from slurm.supervisor import End, Notice, Supervisor, is_down, longest_descent

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers and users send to an agent to say that the job should end soon."""

OWNER_SECONDS = 60.0
"""How long an agent waits to see its own job recorded as the run's."""
_SLACK_SECONDS = 5.0


class Told(RollcallError):
    """The attempt was told to end before this rank had a world."""


@dataclass(frozen=True)
class Agent:
    """What submitit pickles and calls on every rank."""

    run: Path

    def __call__(self) -> End:
        """The end of this attempt; raises `RollcallError` (exit code 1) if it failed."""
        notice = note_signals()
        process.die_with_parent()
        process.adopt_orphans()
        return run_agent(RunPaths(self.run), Environment.detect(), notice)


def run_agent(run: RunPaths, environment: Environment, notice: Notice) -> End:
    """One rank's part of one attempt. When it returns or raises, this rank is down and says so.

    In a finished run nothing is started, and in one that is another job's by now nothing is touched.
    """
    if run.finished.exists():
        return "finished"
    _insist_on_owner(run, environment, notice)
    paths = run.attempt(runs.identity(run).run_id, environment.attempt)
    with SignsOfLife(paths, environment.rank):
        try:
            return _attempt(run, paths, environment, notice)
        except Exception:
            _see_off(run, paths, environment.ranks)
            raise


def _attempt(run: RunPaths, paths: AttemptPaths, environment: Environment, notice: Notice) -> End:
    try:
        end = _take_part(run, paths, environment, notice)
    except Exception as error:
        _record_failure(paths, environment.rank, error)
        raise
    finally:
        process.end_descendants()
        leave(paths, environment.rank)
    if end == "failed":
        failure = files.read_document(paths.first_failure, FirstFailure)
        raise RollcallError(failure.one_line() if failure else "a rank failed without a reason on disk")
    return end


def _take_part(run: RunPaths, paths: AttemptPaths, environment: Environment, notice: Notice) -> End:
    config = read_config(run)
    if environment.restart > config.cluster.max_restarts:
        limit = f"cluster.max_restarts={config.cluster.max_restarts}"
        raise RollcallError(f"this is restart {environment.restart} of the job and {limit}; raise it and submit again")
    with ExitStack() as held:
        try:
            world = _meet(paths, config, environment, notice, held)
        except Told as reason:
            if Events(paths).seen("failed"):
                return "failed"
            Events(paths).publish("draining", f"agent.{environment.rank}", str(reason))
            return "preempted"
        contexts = [RoleContext(paths, config, world, place) for place in world.of_rank(environment.rank)]
        end = Supervisor(contexts, f"agent.{environment.rank}", paths, config.cluster, notice).run()
    if end == "finished" and environment.rank == world.leader:
        _finish(run, paths, config, world)
    return end


def _insist_on_owner(run: RunPaths, environment: Environment, notice: Notice) -> None:
    """Refuse a run that was submitted again as another job, which the scheduler may have queued before this one ended.

    The job may start before its launcher has recorded it, so this waits a little, unless it is told to end.
    """
    if environment.scheduler == "local":
        return

    def settled() -> bool:
        return runs.owns(run, environment.job) or bool(notice.reason)

    with suppress(DeadlineError):
        wait_for("the run to be this job's", settled, OWNER_SECONDS)
    if not runs.owns(run, environment.job):
        told = f"{run.job} names another job than {environment.job}"
        raise RollcallError(f"{told}: the run was submitted again, and this job must not go on with it")


def _see_off(run: RunPaths, paths: AttemptPaths, ranks: int) -> None:
    """Let the other agents come down before this one fails: `srun --kill-on-bad-exit` then ends those that are left.

    One that it ended would look like one that was lost with its node.
    """
    try:
        seconds = 2 * read_config(run).cluster.stop_seconds + _SLACK_SECONDS
        wait_for("the other agents to leave", lambda: not lost_ranks(paths, ranks), seconds)
    except RollcallError:
        return  # the failure is told, whoever is missing


def _meet(paths: AttemptPaths, config: RunConfig, environment: Environment, notice: Notice, held: ExitStack) -> World:
    """Publish this rank's card and wait for the world; `held` keeps the ports until the roles are down."""
    plan, interface = make_plan(config), environment.interface
    if environment.ranks != plan.ranks:
        raise RendezvousError(f"the job has {environment.ranks} ranks and the plan {plan.ranks}; submit the run again")
    gpus, needs = find_gpus(environment.visible_gpus), Needs(free_gpus=any(seat.gpus for seat in plan.seats))
    holders = [held.enter_context(process.hold_port()) for _ in range(plan.ports_per_rank)]
    with Beacon(paths.run_id, environment.attempt, environment.rank, interface) as beacon:
        card = Card(
            rank=environment.rank,
            attempt=environment.attempt,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            boot=boot_id(),
            addresses=environment.addresses,
            beacon=beacon.port,
            ports=tuple(holder.getsockname()[1] for holder in holders),
            gpus=tuple(gpu.index for gpu in gpus),
            memory=free_memory(),
            problems=preflight(paths.run, gpus, needs),
        )
        return meet(
            FileDirectory(paths.rendezvous),
            plan,
            card,
            run_id=paths.run_id,
            seconds=config.cluster.rendezvous_seconds,
            clock=AlertClock(paths, notice),
        )


class AlertClock(Clock):
    """The clock of a rendezvous: a pause ends with `Told` when there is no point in meeting any more."""

    def __init__(self, paths: AttemptPaths, notice: Notice) -> None:
        self._events, self._notice = Events(paths), notice

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        ending = self._events.seen("failed") or self._events.seen("draining")
        if self._notice.reason or ending:
            raise Told(f"{ending.name} by {ending.by}" if ending else self._notice.reason)


def _record_failure(paths: AttemptPaths, rank: int, error: Exception) -> None:
    """Make this rank's failure the attempt's, unless another came first."""
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    failure = FirstFailure(role=f"agent.{rank}", rank=rank, cause=cause, time=time.time(), log="", exit_code=None)
    files.create_document(paths.first_failure, failure)
    Events(paths).publish("failed", failure.role, failure.one_line())


def _finish(run: RunPaths, paths: AttemptPaths, config: RunConfig, world: World) -> None:
    """Close the run, once every role on every rank is down."""
    wait_for(
        "every role to be down",
        lambda: all(is_down(paths, place) for place in world.placements),
        longest_descent(config.cluster),
        missing=lambda: ", ".join(place.name for place in world.placements if not is_down(paths, place)),
    )
    Fence(root_of(config, run, paths.run_id), paths.attempt).check()
    files.create_document(run.finished, Finished(time=time.time(), steps=config.training.steps, attempt=paths.attempt))


def note_signals() -> Notice:
    """From now on the first signal that means "end soon" leaves a note of its name, and those after it do nothing.

    Those that came before it was called, and were blocked until then (see `slurm.allocation`), count too. For good: a
    late signal must not end a process that is about to end, nor reach submitit, which would take it for a request to
    save and requeue.
    """
    notice = Notice()

    def handle(number: int, _frame: FrameType | None) -> None:
        notice.reason = notice.reason or signal.Signals(number).name

    for number in END_SIGNALS:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    return notice
