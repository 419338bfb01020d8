"""Supervision of one rank's roles, from the assignment to a clean end.

Owns starting, monitoring and stopping this rank's roles. Promises that the loop never blocks on a role. A role that
fails is restarted in place if `recovery_policy` allows it, once its process group has exited and after a backoff. A
server that may not be restarted is abandoned while enough others are left (`server_losses`). The first other failure on
any rank stops every role of every rank; a ready trainer first gets `cluster.grace_seconds` to save a checkpoint, or
unlimited time if a launcher waits for it. An orderly shutdown follows `role_lifecycle.SHUTDOWN_ORDER`. When `run`
returns, no process that it started is alive, except those that the kernel cannot end. Events of other ranks may be
visible `lateness` later without changing the end, and a temporary failure of the disk is tolerated
(`pipeline.utils.fs_retry`). Must not know the work of a role.

    end = Supervisor(contexts, f"agent.{rank}", paths, config.cluster).run()
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import msgspec

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import DeadlineError
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.run.events import Event, EventName, EventPoller, Events
from pipeline.run.fault_plan import FAULT
from pipeline.run.first_failure import FirstFailure
from pipeline.run.notices import publish_notice
from pipeline.run.paths import FIRST_FAILURE, AttemptPaths, down_mark
from pipeline.run.poll_rates import ReadSchedule, poll_interval
from pipeline.topology.plan import World
from pipeline.utils import heartbeat, shared_files, subprocesses
from pipeline.utils.forked_process import ForkRequest
from pipeline.utils.fs_retry import (
    FINAL_WRITE_TIMEOUT,
    FS_OUTAGE_TIMEOUT,
    DeferredWrites,
    is_transient,
    retry_transient,
)
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import CLOCK, Clock, Deadline, wait_for
from slurm.agent import role_lifecycle
from slurm.agent.agent_heartbeat import ExitMarkers
from slurm.agent.fault_injection import FaultInjector
from slurm.agent.liveness import LivenessMonitor, Stall
from slurm.agent.node_takeover import WorldFollower
from slurm.agent.oom import OomWatch
from slurm.agent.recovery_policy import EndKind
from slurm.agent.role_failure import cause_of_exit, failure_record, kind_of_exit
from slurm.agent.role_lifecycle import End
from slurm.agent.role_process import FROZEN, SupervisedRole
from slurm.agent.server_losses import ServerLosses
from slurm.scheduler.scheduler_registry import child_environment

POLL_SECONDS = 0.1
_MIN_TIME_TO_STOP = 0.5
_MAX_LINES = 200
"""Most lines of stacks in `first_failure.json`; the role's log has all lines."""


@dataclass
class StopRequest:
    """The reason why the attempt should drain, as a signal handler sets it; empty without a request."""

    reason: str = ""


class Supervisor:
    """The roles of one rank. Single-threaded: a signal handler only sets the `StopRequest`, on which the loop acts."""

    def __init__(
        self,
        contexts: Sequence[RoleContext],
        name: str,
        paths: AttemptPaths,
        cluster: ClusterConfig,
        notice: StopRequest,
        clock: Clock = CLOCK,
        *,
        ranks: int = 1,
        attempt: SharedDir | None = None,
        variables: Mapping[str, str] | None = None,
        forks: str = "",
        follower: WorldFollower | None = None,
        schedule: ReadSchedule | None = None,
    ) -> None:
        """`contexts` are this rank's roles in the order of their start; `name` is the agent's name in events.

        `ranks` agents poll the shared disk, which sets the poll interval; `schedule` is that of an agent with links
        (`slurm.agent.control_link`); `attempt` is the directory at `paths.root`; `variables` are environment variables
        for every role; `forks` is the address of the node's fork server, if any; `follower` observes replaced nodes.
        """
        self._forks, self._variables = forks, dict(variables or {})
        self._name, self._paths, self._cluster = name, paths, cluster
        self._notice, self._clock = notice, clock
        self._attempt = attempt or FileSharedDir(paths.root)
        self._events = Events(paths, self._attempt)
        self._poller = EventPoller(self._events, ranks, clock, schedule)
        self._marks = ExitMarkers(self._attempt, poll_interval(ranks), clock)
        self._outbox, self._published, self._follower = DeferredWrites(), list[EventName](), follower
        self.roles = [self._make_role(context) for context in contexts]
        self._losses = ServerLosses(contexts, self._marks)
        self._oom_watch = OomWatch(clock)
        self._injector = FaultInjector.of_roles(paths, self.roles, clock)
        self._end: End | None = None
        self._ending_since, self._patient, self.last_signs = 0.0, False, dict[str, list[str]]()

    def _make_role(self, context: RoleContext) -> SupervisedRole:
        launch = role_command(context)
        return SupervisedRole(context, launch, self._monitor(context.placement.name, launch))

    def _monitor(self, name: str, launch: RoleCommand) -> LivenessMonitor:
        return LivenessMonitor(name, launch, self._cluster.heartbeat_seconds, self._clock)

    def run(self) -> End:
        """Start all roles. Returns how the attempt ended, once every role of this rank is down."""
        try:
            for role in self.roles:
                self._start(role)
            while not (self._end and all(role.down for role in self.roles)):
                self._step()
                self._clock.sleep(POLL_SECONDS)
            self._poll_events(at_once=True)
            self._flush_events()
        finally:
            for role in self.roles:
                role.kill(0.0)
            for role in self.roles:
                role.kill(subprocesses.KILL_SECONDS)
                role.monitor.close()
        return self._end

    def _step(self) -> None:
        self._outbox.flush()
        if self._follower and (world := self._follower.poll()):
            self._follow(world, self._follower)
        self._poll_events()
        self._oom_watch.look()
        if self._injector is not None and self._end is None:
            with suppress(OSError):  # a fault waits for a disk that fails for a while
                for role, fault in self._injector.inject():
                    self._append_to_timeline(role, FAULT, fault.text)
        for role in self.roles:
            if not role.down:
                self._watch(role)
        if self._end is not None:
            self._stop_next_stage()
        elif failure := self._losses.fatal_failure():
            self._fail_attempt(failure)

    def _follow(self, world: World, follower: WorldFollower) -> None:
        """Adopt a revision of the world: start the roles that this rank takes over, or end those that it has lost."""
        if world.has_lost(follower.rank):
            self._end = "preempted"
            for role in self.roles:
                role.hand_over()
            return
        known = {role.name for role in self.roles}
        self.roles = [role.follow(world) for role in self.roles]
        new = [placement for placement in world.of_rank(follower.rank) if placement.name not in known]
        if new and self._end is None:
            self.roles += [self._make_role(follower.context(world, placement)) for placement in new]
            self._injector = FaultInjector.of_roles(self._paths, self.roles, self._clock)
        self._losses.follow([role.context for role in self.roles])
        for role in self.roles[len(known) :]:
            retry_transient("its status", role.context.forget_status, FINAL_WRITE_TIMEOUT, self._clock)
            self._start(role)

    def _write(self, write: Callable[[], object]) -> None:
        """Perform a write as soon as the disk accepts it, unless another node has this rank's place by then."""
        self._outbox.submit(lambda: (self._follower is not None and self._follower.is_replaced()) or write())

    def _poll_events(self, at_once: bool = False) -> None:
        """Update the attempt's end from its events; a failure overrides an orderly end until the roles are down."""
        events = self._poller.poll(at_once)
        self._apply_timeouts(events)
        if reason := self._poller.outage or ("" if "draining" in events else self._notice.reason):
            self._publish("draining", reason)
        end = role_lifecycle.shutdown_reason([*events, *(event for event in self._published if event not in events)])
        if end is None or end == self._end:
            return
        if (self._end, end) != ("preempted", "failed"):  # else the trainer is already saving, and its grace has begun
            self._ending_since = self._clock.now()
        self._end, self.last_signs = end, {role.name: role.monitor.last_signs() for role in self.roles}

    def _apply_timeouts(self, events: Mapping[EventName, Event]) -> None:
        """Start the grace period when a patient shutdown (no time limit, the launcher waits for the trainer) becomes an
        ordinary one: when this agent gets a stop request too, or a failure ends the attempt."""
        draining = events.get("draining")
        requested = draining is not None and draining.patient and not self._notice.reason
        patient = requested and "failed" not in (*events, *self._published)
        if self._patient and not patient:
            self._ending_since = self._clock.now()
        self._patient = patient

    def _publish(self, event: EventName, detail: str, by: str = "") -> None:
        """Publish an event once. It counts on this rank at once, even while the disk fails."""
        if event not in self._published:
            self._published.append(event)
            self._write(lambda: self._events.publish(event, by or self._name, detail))

    def _flush_events(self) -> None:
        try:
            wait_for("the disk to take the events", self._outbox.flush, FINAL_WRITE_TIMEOUT, clock=self._clock)
        except DeadlineError as late:
            print(late, flush=True)

    def _start(self, role: SupervisedRole, patience: float = FINAL_WRITE_TIMEOUT) -> None:
        """Start the role's process. The loop blocks up to `patience` seconds while the log cannot be created."""
        argv, log = role.launch.argv, role.log
        hidden = {} if role.context.placement.gpus else {"CUDA_VISIBLE_DEVICES": ""}  # no access to GPUs of other roles
        board = role.monitor.board.environment | ({heartbeat.EXITS: "1"} if self._injector else {})
        variables = child_environment({**self._variables, **role.launch.env, **board, **hidden})
        forks = ForkRequest.of(self._forks, role.launch.stage, role.launch.nests)
        start = partial(subprocesses.Child, argv, log, variables, forks)
        role.child = retry_transient("the log", start, patience, self._clock)
        role.deadline = Deadline(f"{role.name} to become ready", self._time_to_start(role), self._clock)
        self._advance(role, "start")
        role.monitor.probe.start()

    def _time_to_start(self, role: SupervisedRole) -> float:
        """Seconds until the role must be ready. If another node reports that, both directions may be visible late."""
        late = 2 * self._cluster.lateness if role.launch.reports_state else 0.0
        return self._cluster.startup_seconds + late

    def _watch(self, role: SupervisedRole) -> None:
        code = role.child.poll() if role.child and role.state != "restarting" else None
        if code is not None:
            self._exited(role, code)
            return
        match role.state:
            case "restarting" if self._end is None and role.pause.passed:
                self._restart(role)
            case "starting" if role.monitor.probe.success_count:
                role.ready_at = self._clock.now()
                self._advance(role, "became_ready")
            case "starting" if role.deadline.passed:
                late = str(role.deadline.error(role.monitor.probe.last_error))
                self._failed(role, "startup_timeout", "late", failure_record(role, late))
            case "starting" if self._end is None and (hang := role.monitor.find_stopped(role.pid)):
                self._hung(role, hang)
            case "stopping" if role.deadline.passed:
                self._advance(role, "ended", f"killed after {role.deadline.seconds:g} s{role.kill()}")
            case "ready" if self._is_monitored(role) and (hang := role.monitor.watch(role.pid)):
                self._hung(role, hang)

    def _is_monitored(self, role: SupervisedRole) -> bool:
        """Whether the watchdog applies. During a shutdown a role has a deadline instead, except a patient trainer."""
        return self._end is None or (self._patient and role.context.placement.role == "trainer")

    def _hung(self, role: SupervisedRole, hang: Stall) -> None:
        """Log the stacks of all processes of the role, since the cause may be in any of them, then fail the role."""
        stacks = role.monitor.stacks(role.pid)
        failure = failure_record(role, hang.cause, stacks=stacks.get(hang.pid, "").splitlines()[:_MAX_LINES])
        texts = [f"\nStacks of process {pid}, whose role hangs:\n{text}" for pid, text in stacks.items()]
        with suppress(OSError):
            shared_files.append(role.log, "".join(texts).encode())
        self._failed(role, "hung", "hang", failure)

    def _exited(self, role: SupervisedRole, code: int) -> None:
        self._poll_events(at_once=role.reason is None)
        if role.state == "stopping":
            self._advance(role, "ended", subprocesses.describe_exit(code))
        elif self._end is not None and code == 0:
            self._advance(role, "finished")
        elif code != 0 or not self._may_learn_cause(role):
            failure = failure_record(role, cause_of_exit(role, code, self._oom_watch), code)
            self._failed(role, "crashed", kind_of_exit(role, code), failure)

    def _may_learn_cause(self, role: SupervisedRole) -> bool:
        """Whether the event behind an exit with code 0 may still appear here: another node's rank of the trainer
        published it, from which this node's ranks of the trainer learned it."""
        if role.context.placement.role != "trainer" or role.context.placement.index == 0:
            return False
        if role.reason is None:
            role.reason = Deadline(f"the reason why {role.name} ended", self._cluster.lateness, self._clock)
        return not role.reason.passed

    def _failed(
        self, role: SupervisedRole, event: role_lifecycle.RoleEvent, kind: EndKind, failure: FirstFailure
    ) -> None:
        """Kill the role's processes, and restart the role, abandon a server, or record the attempt's first failure.

        During a shutdown only the failure of a ready trainer counts, since it had to save a checkpoint.
        """
        stuck = role.kill()
        if not stuck and self._end is None and role.may_restart(kind):
            self._replace(role, kind, failure.cause)
            return
        abandoned = self._losses.abandon(role.context.placement, failure) if self._end is None else ""
        if abandoned:
            publish_notice(self._paths, self._name, f"{role.name}: {failure.cause}{abandoned}")
        trains = role.context.placement.role == "trainer" and role.state == "ready"
        if (self._end is None and not abandoned) or (self._end == "preempted" and trains):
            self._fail_attempt(failure)
        self._advance(role, event, failure.cause + stuck + abandoned)

    def _fail_attempt(self, failure: FirstFailure) -> None:
        print(failure.one_line(), flush=True)  # the disk may refuse it
        self._write(lambda: self._attempt.create(FIRST_FAILURE, failure))
        self._publish("failed", failure.one_line(), failure.role)

    def _replace(self, role: SupervisedRole, kind: EndKind, cause: str) -> None:
        role.budget.use(kind)
        detail = f"{cause}; {role.budget}"
        print(f"{role.name}: {detail}", flush=True)
        role.remember_workers()
        role.monitor.close()
        role.context = replace(role.context, restart=role.context.restart + 1)
        role.launch, role.reason = role_command(role.context), None
        role.monitor = self._monitor(role.name, role.launch)
        ready_seconds = self._clock.now() - role.ready_at if role.state == "ready" else 0.0
        role.pause = Deadline("its pause", role.budget.next_pause(ready_seconds), self._clock)
        role.deadline = Deadline(f"{role.name} to be restarted", FS_OUTAGE_TIMEOUT, self._clock)
        self._advance(role, "replaced", detail)

    def _restart(self, role: SupervisedRole) -> None:
        """Start the role's new process, or try again at the next step, until its deadline. It cannot start while the
        disk refuses its log, or while an old process is exiting, which may write or hold GPU memory."""
        missing = f"the end of its processes{FROZEN}"
        if role.is_gone():
            try:
                role.context.forget_status()
                self._start(role, patience=0.0)
            except OSError as error:
                if not is_transient(error):
                    raise
                missing = f"{role.log} cannot be written: {error.strerror or error}"
            else:
                return
        if role.deadline.passed:
            self._failed(role, "crashed", "final", failure_record(role, str(role.deadline.error(missing))))

    def _stop_next_stage(self) -> None:
        """Request the stop of each role whose predecessors in `SHUTDOWN_ORDER` are down or timed out."""
        for role in self.roles:
            if role.state in ("waiting", "starting", "ready", "restarting") and self._may_stop(role):
                self._advance(role, "stop_requested")
                role.deadline = Deadline(f"{role.name} to stop", self._time_to_stop(), self._clock)
                if role.child is not None:
                    role.child.terminate()

    def _may_stop(self, role: SupervisedRole) -> bool:
        placement = role.context.placement
        if self._shutdown_seconds() > self._patience(role_lifecycle.shutdown_stage(placement.role)):
            return True
        if placement.role == "trainer":
            # A ready trainer saves and exits by itself. The first rank knows that it is ready before the others do.
            first = role.context.world.of_role("trainer")[0]
            return role.state == "starting" and (placement == first or self._marks.is_down(first))
        failed = self._end == "failed"
        return self._marks.are_down(role_lifecycle.must_wait_for(placement, role.context.world, failed=failed))

    def _shutdown_seconds(self) -> float:
        return self._clock.now() - self._ending_since

    def _patience(self, stage: int) -> float:
        """Seconds after which a role of this stage is asked to stop although earlier stages are still up.

        In a finished run, servers and Redis stay until the end is visible to all roles that use them.
        """
        stop = self._cluster.stop_seconds
        grace = math.inf if self._patient else self._cluster.grace_seconds
        trainer = stop / 2 if self._end == "finished" else grace
        late = self._cluster.lateness if self._end == "finished" and stage > 1 else 0.0
        return trainer + (stage - 1) * stop / 2 + late if stage else 0.0

    def _time_to_stop(self) -> float:
        """Seconds between a role's stop request and its kill: fewer for a role whose stage began late."""
        stop = self._cluster.stop_seconds
        last_call = self._patience(len(role_lifecycle.SHUTDOWN_ORDER) - 1) + stop / 2
        return max(_MIN_TIME_TO_STOP, min(stop, last_call - self._shutdown_seconds()))

    def _advance(self, role: SupervisedRole, event: role_lifecycle.RoleEvent, detail: str = "") -> None:
        role.state = role_lifecycle.advance(role.name, role.state, event)
        self._append_to_timeline(role, role.state, detail)
        if role.down:
            self._write(lambda: self._attempt.replace(down_mark(role.name), role.state))

    def _append_to_timeline(self, role: SupervisedRole, state: str, detail: str) -> None:
        rank = role.context.placement.rank
        line = {"time": time.time(), "role": role.name, "rank": rank, "state": state, "detail": detail}
        with suppress(OSError):  # the timeline is for people only
            shared_files.append(self._paths.timeline_of(rank), msgspec.json.encode(line) + b"\n")


def max_shutdown_seconds(cluster: ClusterConfig) -> float:
    """Seconds within which an agent is down after it observed the end. Waits for other ranks add `lateness`."""
    return cluster.grace_seconds + 2 * cluster.stop_seconds


def role_command(context: RoleContext) -> RoleCommand:
    """The command that starts the role, from the role's own module."""
    launch: RoleCommand = import_module(f"pipeline.roles.{context.placement.role}").launch(context)
    return launch
