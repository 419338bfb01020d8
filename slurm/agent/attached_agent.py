"""The agent of an attached job: servers on one node that join the attempts of a run, one after another.

Owns what an agent of a run's own job does not need: the choice of the attempt to serve, the end of the servers with it,
and their departure before. Each node of an attached job is independent of the others, and of the run: no signal, crash
or loss of an attached agent is an event of the run's attempt. Promises that servers are recorded in the attempt only
while they are ready (`pipeline.run.joined_servers`), that they leave it before they stop, and that no process outlives
the agent. A server has the password of the attempt that it serves, so after a requeue of the run it is started again.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError, RendezvousError, RollcallError
from pipeline.roles.role_context import RoleContext, read_config
from pipeline.roles.world_revisions import WorldRevisions
from pipeline.run.completion import is_finished
from pipeline.run.events import Events
from pipeline.run.joined_servers import JoinedServer, JoinedServers
from pipeline.run.paths import AttachedPaths, AttemptPaths
from pipeline.run.poll_rates import TOUCH_SECONDS, touch_interval
from pipeline.topology.assignment import bundle_placements
from pipeline.topology.plan import NodeInfo, Placement, World, make_servers_plan
from pipeline.utils import shared_files, subprocesses
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, FS_OUTAGE_TIMEOUT, retry_transient
from pipeline.utils.network_interfaces import address_towards
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import CLOCK, Clock, Deadline, wait_for
from slurm.agent import role_lifecycle
from slurm.agent.agent import first_failure_text, make_folders, note_signals
from slurm.agent.agent_heartbeat import HeartbeatFile, agent_name, mark_down
from slurm.agent.multi_process_service import multi_process_service
from slurm.agent.neighbor_watch import NeighborCheck
from slurm.agent.node_check import find_node
from slurm.agent.node_forks import node_forks
from slurm.agent.role_process import SupervisedRole
from slurm.agent.supervisor import StopRequest, Supervisor
from slurm.agent.tmpdir import scratch_folder
from slurm.registry import run_registry
from slurm.registry.attached_jobs import mark_ended
from slurm.scheduler.rank_environment import Environment
from slurm.scheduler.scheduler_registry import detect_environment

LEAVE_SECONDS = 3.0
"""Seconds between a server's departure and its stop: the trainer reads the departure, and the actor's client then asks
the server for what its requests have sampled. A request that is slower is repeated elsewhere."""
RECORD_SECONDS = 10.0
"""Interval at which a ready server's record is written again if it is gone: a trainer forgets unreachable servers."""
_LOOK_SECONDS = 0.5
_OBSERVED_RANKS = 4
"""Ranks of the run's job whose heartbeats show that the attempt runs. A single one may be lost and replaced."""
_MISSED_HEARTBEATS = 3
"""Heartbeats by which an attached agent waits longer for the attempt's agents than these wait for each other, so that a
spare node can take the place of a lost one meanwhile."""


@dataclass(frozen=True)
class AttachedAgent:
    """The callable that submitit pickles and calls on every node of an attached job.

    Attributes:
        job: the directory of the attached job.
        first: the index of its first server.
    """

    job: Path
    first: int

    def __call__(self) -> None:
        """Serve until the run ends, or a signal; raises `RollcallError` (exit code 1) if a server failed for good."""
        notice = note_signals()
        subprocesses.exit_with_parent()
        subprocesses.adopt_orphans()
        job, environment = AttachedPaths(self.job), detect_environment()
        try:
            with ExitStack() as resources:
                AttachedNode(job, self.first, environment, notice, resources).serve_attempts()
        finally:
            subprocesses.end_descendants()
        if environment.rank == 0 and not notice.reason:  # after a signal a scheduler may run the job again
            retry_transient("the end of the attached job", lambda: mark_ended(job), FS_OUTAGE_TIMEOUT)


class AttachedNode:
    """One node of an attached job. `resources` holds its ports, GPUs and fork server."""

    def __init__(
        self, job: AttachedPaths, first: int, environment: Environment, notice: StopRequest, resources: ExitStack
    ) -> None:
        self._job, self._environment, self._notice = job, environment, notice
        self._config, self._run_id = read_config(job), run_registry.identity(job).run_id
        plan = make_servers_plan(self._config, first)
        self._bundle = plan.bundles[environment.rank]
        claimed = job.attempt(self._run_id, environment.attempt)
        gpus, unfit = find_node(claimed, plan, environment, resources, self._config.resources.needs_mps)
        if unfit:
            raise RendezvousError(f"this node cannot serve: {', '.join(unfit)}")
        holders = [resources.enter_context(subprocesses.hold_port()) for _ in range(self._bundle.ports)]
        self._ports = tuple(holder.getsockname()[1] for holder in holders)
        self._gpus = tuple(gpu.index for gpu in gpus)
        self._forks = resources.enter_context(node_forks(self._config, ["inference"]))
        needs_mps = self._config.resources.needs_mps and self._config.resources.inference.servers_per_gpu > 1
        service = multi_process_service(needs_mps, environment.attempt, claimed.logs / f"mps.{environment.rank}.log")
        self._variables = resources.enter_context(scratch_folder(environment.attempt)) | resources.enter_context(
            service
        )

    def serve_attempts(self) -> None:
        """Serve the run's attempts until the run ends, has no attempt for `cluster.rendezvous_seconds`, or a signal."""
        ended = ""
        while (served := self._next_attempt(ended)) is not None:
            ended = served.attempt.attempt
            print(f"rollcall: attached to attempt {ended}", flush=True)
            self._serve(served.attempt, served.world)

    def _next_attempt(self, ended: str) -> "_Served | None":
        """The run's current attempt, once it is another one than `ended`; None if there is none left to serve."""
        run, seconds = self._job.served, self._config.cluster.rendezvous_seconds + self._config.cluster.lateness
        over = ""

        def look() -> _Served | Literal["over"] | None:
            nonlocal over
            over = self._notice.reason or ("the run has finished" if is_finished(run) else "")
            return "over" if over else _serveable(self._job, ended)

        try:
            served = wait_for(
                f"an attempt of {run.root.name}",
                lambda: retry_transient("the run's attempt", look, FS_OUTAGE_TIMEOUT),
                seconds,
                longest_pause=_LOOK_SECONDS,
            )
        except DeadlineError as late:
            over, served = str(late), "over"
        if isinstance(served, _Served):
            return served
        print(f"rollcall: left: {over}", flush=True)
        return None

    def _serve(self, attempt: AttemptPaths, world: World) -> None:
        """Run this node's servers in one attempt; `RollcallError` if a server failed for good."""
        rank = self._environment.rank
        name = f"{attempt.attempt}.{self._environment.attempt}.{rank}"
        paths = self._job.attempt(self._run_id, name)
        make_folders(paths)
        placements = self._placements(world)
        own = World(run_id=self._run_id, attempt=name, epoch=0, leader=rank, secret=world.secret, placements=placements)
        retry_transient("the world", lambda: shared_files.write_document(paths.world, own), FINAL_WRITE_TIMEOUT)
        contexts = [RoleContext(paths, self._config, own, placement) for placement in placements]
        watch, joined = AttemptWatch(self._job, attempt, self._config), JoinedServers(attempt)
        try:
            with HeartbeatFile(paths, rank):
                end = AttachedSupervisor(
                    contexts, joined, self._notice, watch, variables=self._variables, forks=self._forks
                ).run()
        finally:
            mark_down(FileSharedDir(paths.root), rank)
            with suppress(OSError):
                paths.world.unlink()  # it has the attempt's secret
        if end == "failed":
            raise RollcallError(first_failure_text(paths))

    def _placements(self, world: World) -> tuple[Placement, ...]:
        node = NodeInfo(
            rank=self._environment.rank,
            attempt=self._environment.attempt,
            hostname="",
            pid=0,
            boot="",
            addresses=(self._address(world),),
            probe_port=0,
            ports=self._ports,
            gpus=self._gpus,
        )
        return tuple(bundle_placements(self._bundle, node))

    def _address(self, world: World) -> str:
        """The address at which the trainer and the actor reach this node."""
        network = self._config.cluster.network
        candidates = self._environment.addresses_on(network)
        if not candidates:
            raise RendezvousError(f"no interface that is up is on cluster.network={network}")
        trainer = world.of_role("trainer")[0].address
        routed = address_towards(trainer) if self._environment.allocated else ""
        return routed if routed in candidates else candidates[0]


@dataclass(frozen=True)
class _Served:
    """An attempt of the run, and its assignment."""

    attempt: AttemptPaths
    world: World


def _serveable(job: AttachedPaths, ended: str) -> _Served | None:
    """The run's current attempt if it is not the one that has `ended`, has met, and is not ending."""
    attempt = current_attempt(job)
    if attempt is None or attempt.attempt == ended or Events(attempt).read_all():
        return None
    world = WorldRevisions(attempt).newest()
    return None if world is None else _Served(attempt, world)


def current_attempt(job: AttachedPaths) -> AttemptPaths | None:
    """The newest attempt of the last submitted job of the run that an attached job serves."""
    FileSharedDir(job.served.attempts).names()  # listing makes NFS drop a cached absence
    submitted = run_registry.submitted_job(job.served)
    return run_registry.last_attempt(job.served, submitted.job) if submitted is not None else None


class AttemptWatch:
    """Whether the attempt that is served has ended: by its events, by a later attempt, or by its agents' silence."""

    def __init__(self, job: AttachedPaths, attempt: AttemptPaths, config: RunConfig, clock: Clock = CLOCK) -> None:
        seconds = max(config.cluster.heartbeat_seconds, FS_OUTAGE_TIMEOUT) + config.cluster.lateness
        self._job, self._attempt, self._clock = job, attempt, clock
        self._seconds = seconds
        self._events, self._worlds = Events(attempt), WorldRevisions(attempt)
        self._agents: dict[int, NeighborCheck] = {}
        self._looks, self._silence = Deadline("a look", 0.0, clock), Deadline("a look", 0.0, clock)

    def end(self) -> str:
        """Why the attempt has ended; empty while it runs, and while the disk fails. Reads the disk twice a second."""
        if not self._looks.passed:
            return ""
        self._looks = Deadline("a look", _LOOK_SECONDS, self._clock)
        with suppress(OSError, RollcallError):
            if events := self._events.read_all():
                return f"attempt {self._attempt.attempt}: {next(iter(events.values())).why}"
            if self._silence.passed:
                self._silence = Deadline("a look", TOUCH_SECONDS, self._clock)
                return self._superseded() or self._silent()
        return ""

    def _superseded(self) -> str:
        newest = current_attempt(self._job)
        return f"attempt {newest.attempt} follows" if newest and newest.attempt != self._attempt.attempt else ""

    def _silent(self) -> str:
        """The silence of the first ranks of the newest assignment: a spare node may have taken the place of a rank."""
        world = self._worlds.newest()
        ranks = sorted({placement.rank for placement in world.placements}) if world else []
        seconds = self._seconds + _MISSED_HEARTBEATS * touch_interval(1 + max(ranks, default=0))
        self._agents = {
            rank: self._agents.get(rank) or NeighborCheck(self._attempt, rank, seconds, self._clock)
            for rank in ranks[:_OBSERVED_RANKS]
        }
        silences = [agent.look() for agent in self._agents.values()]
        return silences[0] if silences and all(silences) else ""


class AttachedSupervisor(Supervisor):
    """Supervises the servers of one attached node, which stop with the attempt that they serve, or leave it."""

    def __init__(
        self,
        contexts: Sequence[RoleContext],
        joined: JoinedServers,
        signals: StopRequest,
        watch: AttemptWatch,
        clock: Clock = CLOCK,
        *,
        variables: dict[str, str],
        forks: str,
    ) -> None:
        """`contexts` have the paths of the attached agent, whose events concern only its own servers; `joined` are the
        records of the attempt that `watch` observes; `signals` notes those to this agent."""
        first = contexts[0]
        name, cluster = agent_name(first.placement.rank), first.config.cluster
        super().__init__(contexts, name, first.paths, cluster, StopRequest(), clock, variables=variables, forks=forks)
        self._joined, self._signals, self._attempt_watch = joined, signals, watch
        self._recorded: set[str] = set()
        self._departure: Deadline | None = None
        self._renewal = Deadline("a look at the records", RECORD_SECONDS, clock)

    def _step(self) -> None:
        self._notice.reason = self._notice.reason or self._signals.reason or self._attempt_watch.end()
        if self._end is None and self._renewal.passed:
            self._renewal = Deadline("a look at the records", RECORD_SECONDS, self._clock)
            self._renew_records()
        super()._step()

    def _advance(self, role: SupervisedRole, event: role_lifecycle.RoleEvent, detail: str = "") -> None:
        super()._advance(role, event, detail)
        if role.state == "ready" and self._end is None:
            self._recorded.add(role.name)
            self._outbox.submit(partial(self._joined.write, _record(role)))
        else:
            self._withdraw(role)

    def _may_stop(self, role: SupervisedRole) -> bool:
        """Whether the servers have left: their records are removed, and requests then move away."""
        if self._departure is None:
            for leaving in self.roles:
                self._withdraw(leaving)
            # Nobody sends requests in an attempt that has ended.
            seconds = LEAVE_SECONDS if self._signals.reason else 0.0
            self._departure = Deadline("requests to move away", seconds, self._clock)
        return self._departure.passed

    def _withdraw(self, role: SupervisedRole) -> None:
        if role.name in self._recorded:
            self._recorded.discard(role.name)
            self._outbox.submit(partial(self._joined.remove, role.name))

    def _renew_records(self) -> None:
        with suppress(OSError):
            for role in self.roles:
                if role.name in self._recorded and not self._joined.has(role.name):
                    self._joined.write(_record(role))


def _record(role: SupervisedRole) -> JoinedServer:
    return JoinedServer(name=role.name, endpoint=role.context.placement.endpoint, since=time.time())
