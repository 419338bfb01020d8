"""The agent: the process on every rank that runs one attempt, and the handler of the scheduler's signals.

The functions follow an attempt: rendezvous with the other ranks, get the assignment ("world"), run this rank's roles,
shut down. Promises that no process it started outlives it, and that the reason of a failure is on disk before it
returns.
"""

import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from pipeline.checkpoints import Fence, root_of
from pipeline.config import RunConfig
from pipeline.errors import DeadlineError, RendezvousError, RollcallError, one_line
from pipeline.roles.role_context import RoleContext, read_config
from pipeline.roles.world_revisions import WorldRevisions
from pipeline.run.completion import finish, is_finished
from pipeline.run.events import EventPoller, Events
from pipeline.run.fault_conditions import apply_file_faults
from pipeline.run.fault_plan import parse_faults
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import FIRST_FAILURE, AttemptPaths, RunPaths
from pipeline.run.poll_rates import poll_interval, touch_interval
from pipeline.run.run_documents import Finished
from pipeline.topology.plan import NodeInfo, World, make_plan
from pipeline.train.train_jobs import steps_without_rl
from pipeline.utils import network_interfaces, subprocesses
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, FS_OUTAGE_TIMEOUT, retry_transient
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.agent_heartbeat import ExitMarkers, HeartbeatFile, OtherAgents, agent_name, mark_down
from slurm.agent.control_link import ControlLinks
from slurm.agent.control_tree import ChangeBoard
from slurm.agent.multi_process_service import multi_process_service, share_gpus
from slurm.agent.neighbor_watch import NeighborWatch
from slurm.agent.node_check import find_node, warn_of_open_files
from slurm.agent.node_forks import node_forks, roles_of
from slurm.agent.node_partition import NodePartition, processes_of
from slurm.agent.node_report import report_node
from slurm.agent.node_takeover import WorldFollower, replace_lost_node
from slurm.agent.preflight import free_memory, node_id
from slurm.agent.role_lifecycle import End
from slurm.agent.supervisor import StopRequest, Supervisor, max_shutdown_seconds
from slurm.agent.tmpdir import scratch_folder
from slurm.registry import run_registry
from slurm.rendezvous.probe_server import ProbeServer
from slurm.rendezvous.rank_meeting import rendezvous
from slurm.scheduler.rank_environment import Environment
from slurm.scheduler.scheduler_registry import detect_environment

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which schedulers and users request an agent's end."""

OWNERSHIP_SECONDS = 180.0
"""Seconds until its job must be on record as the run's: the launcher may record it late."""
FOLLOW_SECONDS = 1.0
"""Pause between two listings for a revision of the world, in a run with spare nodes."""
LEAVE_PAUSE = 0.5
"""Longest pause between two looks for the exit markers of other agents, where more ranks need none that is longer."""
_SLACK_SECONDS = 5.0


class StoppedBeforeWorld(RollcallError):
    """The attempt ended before this rank had an assignment."""


@dataclass(frozen=True)
class Agent:
    """The callable that submitit pickles and calls on every rank."""

    run: Path

    def __call__(self) -> End:
        """Run this rank. Returns the attempt's end; raises `RollcallError` (exit code 1) if it failed."""
        notice = note_signals()
        subprocesses.exit_with_parent()
        subprocesses.adopt_orphans()
        return run_agent(RunPaths(self.run), detect_environment(), notice)


def run_agent(run: RunPaths, environment: Environment, notice: StopRequest) -> End:
    """Run one rank's part of one attempt. When it returns or raises, this rank is down and has its exit marker.

    In a finished run it starts nothing. In a run that now belongs to another job it writes nothing.
    """
    if retry_transient("the end of the run", lambda: is_finished(run), FINAL_WRITE_TIMEOUT):
        return "finished"
    _require_ownership(run, environment, notice)
    identity = retry_transient("the run's identity", lambda: run_registry.identity(run), FINAL_WRITE_TIMEOUT)
    paths = run.attempt(identity.run_id, environment.attempt)
    with HeartbeatFile(paths, environment.rank, touch_interval(environment.ranks)) as heartbeat:
        try:
            links = ControlLinks(paths, environment.rank, environment.ranks, heartbeat.vouch)
            return _attempt(run, paths, environment, notice, links)
        except Exception:
            _wait_for_other_agents(run, FileSharedDir(paths.root), environment.ranks)
            raise


def _attempt(
    run: RunPaths, paths: AttemptPaths, environment: Environment, notice: StopRequest, links: ControlLinks
) -> End:
    with ExitStack() as resources:  # held until no descendant that may use them runs
        try:
            make_folders(paths)
            end = _run_attempt(run, paths, environment, notice, resources, links)
        except Exception as error:
            _log_failure(paths, environment.rank, one_line(error))
            raise
        finally:
            subprocesses.end_descendants()
            mark_down(FileSharedDir(paths.root), environment.rank)
    if end == "failed":
        raise RollcallError(first_failure_text(paths))
    return end


def make_folders(paths: AttemptPaths) -> None:
    """Create the folders in which ranks read each other's files, before any rank reads them.

    A client of a shared file system may cache a folder's absence.
    """
    for folder in paths.shared:
        retry_transient(str(folder), partial(folder.mkdir, parents=True, exist_ok=True), FINAL_WRITE_TIMEOUT)


def first_failure_text(paths: AttemptPaths) -> str:
    """The first failure of a failed attempt, in one line."""
    attempt = FileSharedDir(paths.root, FINAL_WRITE_TIMEOUT)
    failure, event = attempt.read(FIRST_FAILURE, FirstFailure), Events(paths, attempt).get("failed")
    if failure is not None:
        return failure.one_line()
    return event.detail if event else "a rank failed without a reason on disk"


def _run_attempt(
    run: RunPaths,
    paths: AttemptPaths,
    environment: Environment,
    notice: StopRequest,
    resources: ExitStack,
    links: ControlLinks,
) -> End:
    """Rendezvous, then run the roles. `resources` keeps the ports, GPUs and folders that the agent holds for them."""
    config = read_config(run)
    faults = parse_faults(config.faults)
    apply_file_faults(paths, faults, environment.rank)
    if environment.restart > config.cluster.max_restarts:
        limit = f"cluster.max_restarts={config.cluster.max_restarts}"
        raise RollcallError(f"this is restart {environment.restart} of the job and {limit}; raise it and submit again")
    roles = roles_of(make_plan(config), [environment.rank])
    forks = resources.enter_context(node_forks(config, roles))
    try:
        world = _meet(paths, config, environment, notice, resources, links)
    except StoppedBeforeWorld as reason:
        events = Events(paths, FileSharedDir(paths.root, FINAL_WRITE_TIMEOUT))
        if events.get("failed"):
            return "failed"
        events.publish("draining", agent_name(environment.rank), str(reason))
        return "preempted"
    contexts = [RoleContext(paths, config, world, placement) for placement in world.of_rank(environment.rank)]
    agent, ranks = agent_name(environment.rank), environment.ranks
    service = multi_process_service(
        config.resources.needs_mps and _may_share_gpus(world, environment.rank),
        paths.attempt,
        paths.logs / f"mps.{environment.rank}.log",
    )
    variables = resources.enter_context(scratch_folder(paths.attempt, shared=config.cluster.compile_cache))
    seconds = max(config.cluster.heartbeat_seconds, FS_OUTAGE_TIMEOUT) + config.cluster.lateness
    revisions = links.schedule("revisions", FOLLOW_SECONDS)
    follower = WorldFollower(paths, config, environment.rank, revisions) if world.spares else None
    report = partial(_handle_lost_rank, paths, config, agent, links.board)
    links.use_addresses(world.address_of_rank)
    with links, NeighborWatch(paths, environment.rank, ranks, seconds, report, links), service as shared_gpus:
        supervisor = Supervisor(
            contexts,
            agent,
            paths,
            config.cluster,
            notice,
            ranks=ranks,
            variables=variables | shared_gpus,
            forks=forks,
            follower=follower,
            schedule=links.schedule("events"),
        )
        addresses = world.rank_of_address
        with NodePartition(paths, faults, environment.rank, addresses, lambda: processes_of(supervisor.roles)):
            end = supervisor.run()
    if end == "failed":
        report_node(paths, environment.rank, supervisor.last_signs)
    if end == "finished" and follower is not None:
        world = retry_transient("the world", WorldRevisions(paths).newest, FINAL_WRITE_TIMEOUT) or world
    if end == "finished" and environment.rank == world.leader:
        _finish(run, paths, config, world)
    return end


def _may_share_gpus(world: World, rank: int) -> bool:
    """Whether roles of a rank share a GPU, now or, on a spare node, perhaps later."""
    is_spare = any(node.gpus for node in world.spares if node.rank == rank)
    return is_spare or share_gpus(placement.gpus for placement in world.of_rank(rank))


def _require_ownership(run: RunPaths, environment: Environment, notice: StopRequest) -> None:
    """Raise `RollcallError` if the run was submitted again as another job, which may have been queued meanwhile.

    The job may start before its launcher has recorded it, so this waits up to `OWNERSHIP_SECONDS`, or until a stop
    request.
    """
    if not environment.allocated:  # the lock of a local job excludes others
        return

    def ours() -> bool:
        return retry_transient("the run's job", lambda: run_registry.owns(run, environment.job), FINAL_WRITE_TIMEOUT)

    with suppress(DeadlineError):
        wait_for("the run to be this job's", lambda: ours() or bool(notice.reason), OWNERSHIP_SECONDS)
    if not ours():
        mismatch = f"{run.job} names another job than {environment.job}"
        raise RollcallError(f"{mismatch}: the run was submitted again, and this job must not continue it")


def _wait_for_other_agents(run: RunPaths, attempt: SharedDir, ranks: int, clock: Clock = CLOCK) -> None:
    """Wait for the other agents' exit markers before this agent fails, since the scheduler then kills the rest.

    A killed agent would look like one that was lost with its node. Both the failure and the markers may be visible
    late, hence twice `lateness`.
    """
    try:
        cluster = read_config(run).cluster
        seconds = max_shutdown_seconds(cluster) + 2 * cluster.lateness + _SLACK_SECONDS
        others = OtherAgents(attempt, ranks, clock)
        pause = max(LEAVE_PAUSE, poll_interval(ranks))
        wait_for("the other agents to leave", others.have_exited, seconds, longest_pause=pause, clock=clock)
    except RollcallError:
        return  # the failure is reported even if agents are missing


def _meet(
    paths: AttemptPaths,
    config: RunConfig,
    environment: Environment,
    notice: StopRequest,
    resources: ExitStack,
    links: ControlLinks,
) -> World:
    """Publish this rank's node record and wait for the assignment. `resources` keeps its ports, its GPUs, and the probe
    server, through which `links` answers other agents."""
    plan, interface = make_plan(config), environment.interface
    if environment.ranks != plan.ranks:
        raise RendezvousError(f"the job has {environment.ranks} ranks and the plan {plan.ranks}; submit the run again")
    if environment.rank == 0:
        warn_of_open_files(plan, config)
    gpus, unfit = find_node(paths, plan, environment, resources, config.resources.needs_mps)
    holders = [resources.enter_context(subprocesses.hold_port()) for _ in range(plan.ports_per_rank)]
    addresses, token = environment.addresses_on(config.cluster.network), secrets.token_hex(16)
    if len(addresses) == 1:
        interface = addresses[0]
    beacon = resources.enter_context(
        ProbeServer(paths.run_id, environment.attempt, environment.rank, interface, token, links.answer)
    )
    node_info = NodeInfo(
        rank=environment.rank,
        attempt=environment.attempt,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        boot=node_id(),
        addresses=addresses,
        probe_port=beacon.port,
        ports=tuple(holder.getsockname()[1] for holder in holders),
        gpus=tuple(gpu.index for gpu in gpus),
        memory=free_memory(),
        problems=(*unfit, *_off_network(addresses, config.cluster.network)),
        token=token,
        process_began=psutil.Process().create_time(),
        published=time.time(),
    )
    return rendezvous(
        FileSharedDir(paths.rendezvous, FINAL_WRITE_TIMEOUT),
        plan,
        node_info,
        run_id=paths.run_id,
        seconds=config.cluster.rendezvous_seconds,
        clock=StoppableClock(paths, notice, plan.ranks),
    )


def _off_network(addresses: Sequence[str], network: str) -> list[str]:
    """The problem of a node without an address on `cluster.network`; empty if it has one."""
    if addresses:
        return []
    interfaces = network_interfaces.describe_interfaces()
    return [f"no interface that is up is on cluster.network={network} (there are: {interfaces})"]


class StoppableClock(Clock):
    """The clock of a rendezvous. A pause raises `StoppedBeforeWorld` once the attempt ends or a signal has arrived."""

    def __init__(self, paths: AttemptPaths, notice: StopRequest, ranks: int) -> None:
        self._poller, self._notice = EventPoller(Events(paths), ranks), notice

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        events = self._poller.poll()
        ending = events.get("failed") or events.get("draining")
        if self._notice.reason or ending:
            raise StoppedBeforeWorld(f"{ending.name} by {ending.by}" if ending else self._notice.reason)


def _handle_lost_rank(
    paths: AttemptPaths, config: RunConfig, by: str, board: ChangeBoard, rank: int, cause: str
) -> bool:
    """Replace a lost rank by a spare one, and return True; else record it as the attempt's failure, unless the attempt
    is ending anyway: it has an event, which may not be visible here yet (`board`)."""
    if board.known.events:
        return False
    why = ""
    with suppress(OSError):
        if Events(paths, FileSharedDir(paths.root, FINAL_WRITE_TIMEOUT)).read_all():
            return False
        replaced, why = replace_lost_node(paths, config, rank, cause, by)
        if replaced:
            return True
    _log_failure(paths, rank, f"{cause}; {why}" if why else cause)
    return False


def _log_failure(paths: AttemptPaths, rank: int, cause: str) -> None:
    """Record this rank's failure as the attempt's, unless another one was recorded first."""
    failure = FirstFailure(role=agent_name(rank), rank=rank, cause=cause, time=time.time(), log="", exit_code=None)
    attempt = FileSharedDir(paths.root, FINAL_WRITE_TIMEOUT)
    try:
        attempt.create(FIRST_FAILURE, failure)
        Events(paths, attempt).publish("failed", failure.role, failure.one_line())
    except OSError as error:
        print(f"rollcall: the disk refused the record of a failure: {failure.one_line()} ({error})", flush=True)


def _finish(
    run: RunPaths,
    paths: AttemptPaths,
    config: RunConfig,
    world: World,
    attempt: SharedDir | None = None,
    clock: Clock = CLOCK,
) -> None:
    """Mark the run as finished once every role on every rank is down, by the markers in `attempt`.

    `attempt` is the directory at `paths.root`. The end and the markers may be visible late, hence twice `lateness`.
    """
    pause = poll_interval(len(world.placements))
    markers = ExitMarkers(attempt or FileSharedDir(paths.root), pause, clock)
    wait_for(
        "every role to be down",
        lambda: markers.are_down(world.placements),
        max_shutdown_seconds(config.cluster) + 2 * config.cluster.lateness,
        missing=lambda: ", ".join(other.name for other in world.placements if not markers.is_down(other)),
        pause=pause,
        clock=clock,
    )
    Fence(root_of(config, run, paths.run_id), paths.attempt, any_restart=True).check()
    finished = Finished(time=time.time(), steps=_steps_of(run, config), attempt=paths.attempt)
    retry_transient("the end of the run", lambda: finish(run, finished), FS_OUTAGE_TIMEOUT, clock)


def _steps_of(run: RunPaths, config: RunConfig) -> int:
    """The steps of a finished run: RL steps, else SFT steps; for job files the largest step of any job."""
    if config.training.jobs:
        return max((row["step"] for row in read_rows(run.metrics)), default=0)
    if config.evaluation.only:
        return config.evaluation.step
    return config.training.steps or steps_without_rl(run, config)


def note_signals() -> StopRequest:
    """Install handlers for `END_SIGNALS`: the first signal sets the returned request, and later ones do nothing.

    Signals that were blocked until this call (see `slurm.scheduler.slurm.batch_file`) count too. The handlers stay: a
    late signal must neither kill a process that is about to exit, nor reach submitit, which would save and requeue.
    """
    notice = StopRequest()

    def handle(number: int, _frame: FrameType | None) -> None:
        notice.reason = notice.reason or signal.Signals(number).name

    for number in END_SIGNALS:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    return notice
