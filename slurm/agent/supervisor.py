"""Runs the roles of one rank, from the world to a clean end.

Owns starting, watching and stopping this rank's roles. Promises that the loop waits for no role's answer; that a server
which fails after it was ready is started again, up to `inference.restarts` times, once nothing is left of its group and
after a pause that grows; that the first other failure on any rank stops every role of every rank, a trainer that is
ready after it had time to commit (`cluster.grace_seconds`; as long as it needs where a launcher waits for it); that an
orderly end comes down in the order of `role_lifecycle.SHUTDOWN_ORDER`; that when `run` returns nothing it started is
alive, but for what the kernel itself cannot end; that what other ranks tell may be seen `lateness` later and changes no
end; and that a disk which fails for a while is tolerated (`pipeline.utils.fs_retry`). Must not know what a role does.

    end = Supervisor(contexts, f"agent.{rank}", paths, config.cluster).run()
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import msgspec

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import DeadlineError
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.run.events import Event, EventName, EventPoller, Events, poll_interval
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import FIRST_FAILURE, AttemptPaths, down_mark
from pipeline.utils import subprocesses
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
from slurm.agent.liveness import LivenessMonitor, Stall
from slurm.agent.oom import OomWatch
from slurm.agent.role_process import FROZEN, SupervisedRole
from slurm.scheduler.slurm.slurm_environment import child_environment

End = Literal["finished", "preempted", "failed"]
ENDINGS: tuple[tuple[EventName, End], ...] = (
    ("failed", "failed"),
    ("training_finished", "finished"),
    ("draining", "preempted"),
)
"""Which event means which end, the strongest first; but nothing that is told after `training_finished` counts."""

POLL_SECONDS = 0.1
_MIN_TIME_TO_STOP = 0.5
_MAX_LINES = 200
"""Most lines of stacks in `first_failure.json`; the role's log has all of them."""


@dataclass
class StopRequest:
    """A note that a signal handler leaves: why the attempt should drain; empty if nobody asked."""

    reason: str = ""


class Supervisor:
    """The roles of one rank. Single-threaded: a signal only leaves a note, the loop does the rest."""

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
    ) -> None:
        """`contexts` are this rank's roles in the order to start them; `name` is the agent's own.

        `ranks` is how many look at the disk like this one; `attempt` is the directory at `paths.root`; `variables` are
        those that every role gets.
        """
        self._variables = dict(variables or {})
        self._name, self._paths, self._cluster = name, paths, cluster
        self._notice, self._clock = notice, clock
        self._attempt = attempt or FileSharedDir(paths.root)
        self._events = Events(paths, self._attempt)
        self._listener = EventPoller(self._events, ranks, clock)
        self._marks = ExitMarkers(self._attempt, poll_interval(ranks), clock)
        self._outbox, self._said = DeferredWrites(), list[EventName]()
        self._roles = [self._supervised(context) for context in contexts]
        self._shortage = OomWatch(clock)
        self._end: End | None = None
        self._ending_since = 0.0
        self._patient = False

    def _supervised(self, context: RoleContext) -> SupervisedRole:
        launch = role_command(context)
        return SupervisedRole(context, launch, self._vitals(context.placement.name, launch))

    def _vitals(self, name: str, launch: RoleCommand) -> LivenessMonitor:
        return LivenessMonitor(name, launch, self._cluster.heartbeat_seconds, self._clock)

    def run(self) -> End:
        """Start all roles and return how the attempt ended on this rank, when everything here is down."""
        try:
            for role in self._roles:
                self._start(role)
            while not (self._end and all(role.down for role in self._roles)):
                self._step()
                self._clock.sleep(POLL_SECONDS)
            self._listen(at_once=True)
            self._flush_events()
        finally:
            for role in self._roles:
                role.kill(0.0)
            for role in self._roles:
                role.kill(subprocesses.KILL_SECONDS)
                role.vitals.close()
        return self._end

    def _step(self) -> None:
        self._outbox.flush()
        self._listen()
        self._shortage.look()
        for role in self._roles:
            if not role.down:
                self._watch(role)
        if self._end is not None:
            self._stop_next_stage()

    def _listen(self, at_once: bool = False) -> None:
        """Learn how the attempt ends; a failure overrides an orderly end until the roles are down."""
        heard = self._listener.poll(at_once)
        self._apply_timeouts(heard)
        if reason := self._listener.outage or ("" if "draining" in heard else self._notice.reason):
            self._say("draining", reason)
        end = shutdown_reason([*heard, *(event for event in self._said if event not in heard)])
        if end is None or end == self._end:
            return
        if (self._end, end) != ("preempted", "failed"):  # else the trainer commits already
            self._ending_since = self._clock.now()
        self._end = end

    def _apply_timeouts(self, heard: Mapping[EventName, Event]) -> None:
        """The trainer takes as long as it needs while the launcher waits for it: until this agent is told to end too,
        or something else ends the attempt. Then the grace begins."""
        draining = heard.get("draining")
        asked = draining is not None and draining.patient and not self._notice.reason
        patient = asked and "failed" not in (*heard, *self._said)
        if self._patient and not patient:
            self._ending_since = self._clock.now()
        self._patient = patient

    def _say(self, event: EventName, detail: str, by: str = "") -> None:
        """Tell an event, once; here it counts from now on, whenever the disk takes it."""
        if event not in self._said:
            self._said.append(event)
            self._outbox.submit(lambda: self._events.publish(event, by or self._name, detail))

    def _flush_events(self) -> None:
        try:
            wait_for("the disk to take what was said", self._outbox.flush, FINAL_WRITE_TIMEOUT, clock=self._clock)
        except DeadlineError as late:
            print(late, flush=True)

    def _start(self, role: SupervisedRole, patience: float = FINAL_WRITE_TIMEOUT) -> None:
        """Start its process; a disk that takes no log is borne for `patience` seconds, in which the loop stands."""
        argv, log = role.launch.argv, self._log(role)
        hidden = {} if role.context.placement.gpus else {"CUDA_VISIBLE_DEVICES": ""}  # others' are not for the taking
        variables = child_environment({**self._variables, **role.launch.env, **role.vitals.board.environment, **hidden})
        role.child = retry_transient("the log", lambda: subprocesses.Child(argv, log, variables), patience, self._clock)
        role.deadline = Deadline(f"{role.name} to become ready", self._time_to_start(role), self._clock)
        self._advance(role, "start")
        role.vitals.probe.start()

    def _time_to_start(self, role: SupervisedRole) -> float:
        """Another node, which tells that the role is ready, may see the world late, and its word be seen late here."""
        late = 2 * self._cluster.lateness if role.launch.reports_state else 0.0
        return self._cluster.startup_seconds + late

    def _watch(self, role: SupervisedRole) -> None:
        code = role.child.poll() if role.child and role.state != "restarting" else None
        if code is not None:
            self._ended(role, code)
            return
        match role.state:
            case "restarting" if self._end is None and role.pause.passed:
                self._restart(role)
            case "starting" if role.vitals.probe.success_count:
                self._advance(role, "became_ready")
            case "starting" if role.deadline.passed:
                self._failed(
                    role,
                    "overslept",
                    self._failure_record(role, str(role.deadline.error(role.vitals.probe.last_error))),
                )
            case "stopping" if role.deadline.passed:
                self._kill(role)
            case "ready" if self._is_watched(role) and (hang := role.vitals.watch(role.pid)):
                self._hung(role, hang)

    def _is_watched(self, role: SupervisedRole) -> bool:
        """Whether a hang of the role is looked for: it has a deadline in an attempt that comes down, unless that waits
        for the trainer."""
        return self._end is None or (self._patient and role.context.placement.role == "trainer")

    def _hung(self, role: SupervisedRole, hang: Stall) -> None:
        """Have all its processes tell where they are, those that hang and those that wait for them, then end it."""
        stacks = role.vitals.stacks(role.pid)
        failure = self._failure_record(role, hang.cause, stacks=stacks.get(hang.pid, "").splitlines()[:_MAX_LINES])
        told = [f"\nStacks of process {pid}, as its role was taken for hung:\n{text}" for pid, text in stacks.items()]
        with suppress(OSError):
            _append(self._log(role), "".join(told).encode())
        self._failed(role, "hung", failure)

    def _ended(self, role: SupervisedRole, code: int) -> None:
        self._listen(at_once=role.reason is None)
        if role.state == "stopping":
            self._advance(role, "ended", subprocesses.describe_exit(code))
        elif self._end is not None and code == 0:
            self._advance(role, "finished")
        elif code != 0 or not self._may_learn_cause(role):
            self._failed(role, "died", self._failure_record(role, self._cause(role, code), code))

    def _cause(self, role: SupervisedRole, code: int) -> str:
        """Why a role ended, as far as anybody told. When one of its processes is killed, torchrun exits with 1 and vLLM
        with 0."""
        explained = self._shortage.explains(code, _last_lines(self._log(role)))
        return f"{subprocesses.describe_exit(code)}{explained}{_own_failure(role)}{role.taken_ports()}"

    def _may_learn_cause(self, role: SupervisedRole) -> bool:
        """Whether the reason of a role that ended well may be on its way: the trainer tells it on one rank alone, and
        ends on all."""
        if role.reason is None:
            role.reason = Deadline(f"the reason why {role.name} ended", self._cluster.lateness, self._clock)
        return not role.reason.passed

    def _failure_record(
        self, role: SupervisedRole, cause: str, code: int | None = None, stacks: Sequence[str] = ()
    ) -> FirstFailure:
        return FirstFailure(
            role=role.name,
            rank=role.context.placement.rank,
            cause=cause,
            exit_code=code,
            time=time.time(),
            log=str(self._log(role)),
            last_lines=_last_lines(self._log(role)),
            stacks=tuple(stacks),
        )

    def _log(self, role: SupervisedRole) -> Path:
        return self._paths.log(role.context.placement.role, role.context.placement.index)

    def _failed(self, role: SupervisedRole, happening: role_lifecycle.RoleEvent, failure: FirstFailure) -> None:
        """Record the first failure of the attempt, and end what is left of the role; a server gets a new process.

        While an attempt comes down, only the failure of a trainer that was ready still counts: it was to commit.
        """
        stuck = role.kill()
        if not stuck and self._may_replace(role):
            self._replace(role, failure.cause)
            return
        trains = role.context.placement.role == "trainer" and role.state == "ready"
        if self._end is None or (self._end == "preempted" and trains):
            print(failure.one_line(), flush=True)  # the disk may take nothing
            self._outbox.submit(lambda: self._attempt.create(FIRST_FAILURE, failure))
            self._say("failed", failure.one_line(), role.name)
        self._advance(role, happening, failure.cause + stuck)

    def _may_replace(self, role: SupervisedRole) -> bool:
        """Whether a new process may do better: one that never was ready would fail again."""
        once_ready = role.state == "ready" or (role.state == "starting" and role.replaced > 0)
        left = role.replaced < role.context.config.inference.restarts
        return self._end is None and once_ready and left and role.context.placement.role in role_lifecycle.REPLACEABLE

    def _replace(self, role: SupervisedRole, cause: str) -> None:
        role.replaced += 1
        told = f"{cause}; started again, {role.replaced} of inference.restarts={role.context.config.inference.restarts}"
        print(f"{role.name}: {told}", flush=True)
        role.vitals.close()
        role.vitals, role.reason = self._vitals(role.name, role.launch), None
        role.pause = Deadline("its pause", next(role.pauses), self._clock)
        role.deadline = Deadline(f"{role.name} to be started again", FS_OUTAGE_TIMEOUT, self._clock)
        self._advance(role, "replaced", told)

    def _restart(self, role: SupervisedRole) -> None:
        """Start its new process, unless the disk takes no log, or the kernel still ends one of the processes before: it
        may hold the memory of their GPUs. Then again at the next step, until its deadline."""
        missing = f"the end of its processes{FROZEN}"
        if role.child is None or role.child.group_is_gone():
            try:
                self._start(role, patience=0.0)
            except OSError as error:
                if not is_transient(error):
                    raise
                missing = f"{self._log(role)} cannot be written: {error.strerror or error}"
            else:
                return
        if role.deadline.passed:
            self._failed(role, "died", self._failure_record(role, str(role.deadline.error(missing))))

    def _stop_next_stage(self) -> None:
        """Ask those roles to stop whose turn has come."""
        for role in self._roles:
            if role.state in ("waiting", "starting", "ready", "restarting") and self._may_stop(role):
                self._advance(role, "asked_to_stop")
                role.deadline = Deadline(f"{role.name} to stop", self._time_to_stop(), self._clock)
                if role.child is not None:
                    role.child.terminate()

    def _may_stop(self, role: SupervisedRole) -> bool:
        placement = role.context.placement
        if self._shutdown_seconds() > self._patience(role_lifecycle.shutdown_stage(placement.role)):
            return True
        if placement.role == "trainer":
            # Once it is ready it commits and ends by itself; and that it is, one rank knows before the others.
            first = role.context.world.of_role("trainer")[0]
            return role.state == "starting" and (placement == first or self._marks.is_down(first))
        before = role_lifecycle.must_wait_for(placement, role.context.world, failed=self._end == "failed")
        return all(self._marks.is_down(other) for other in before)

    def _shutdown_seconds(self) -> float:
        return self._clock.now() - self._ending_since

    def _patience(self, stage: int) -> float:
        """Seconds after which a role is asked to stop although others, before it in the descent, are still up.

        In a run that finished there is time: what others still talk to stays until they must have heard of the end.
        """
        stop = self._cluster.stop_seconds
        grace = math.inf if self._patient else self._cluster.grace_seconds
        trainer = stop / 2 if self._end == "finished" else grace
        late = self._cluster.lateness if self._end == "finished" and stage > 1 else 0.0
        return trainer + (stage - 1) * stop / 2 + late if stage else 0.0

    def _time_to_stop(self) -> float:
        """Seconds between asking a role to stop and ending it: less for those whose turn came late."""
        stop = self._cluster.stop_seconds
        last_call = self._patience(len(role_lifecycle.SHUTDOWN_ORDER) - 1) + stop / 2
        return max(_MIN_TIME_TO_STOP, min(stop, last_call - self._shutdown_seconds()))

    def _kill(self, role: SupervisedRole) -> None:
        self._advance(role, "ended", f"killed after {role.deadline.seconds:g} s{role.kill()}")

    def _advance(self, role: SupervisedRole, happening: role_lifecycle.RoleEvent, detail: str = "") -> None:
        role.state = role_lifecycle.advance(role.name, role.state, happening)
        rank = role.context.placement.rank
        line = {"time": time.time(), "role": role.name, "rank": rank, "state": role.state, "detail": detail}
        with suppress(OSError):  # it is for people: nothing waits for it
            _append(self._paths.timeline_of(rank), msgspec.json.encode(line) + b"\n")
        if role.down:
            self._outbox.submit(lambda: self._attempt.replace(down_mark(role.name), role.state))


def _own_failure(role: SupervisedRole) -> str:
    """What the role itself said of its failure, if it could."""
    status = role.context.status()
    return f": {status.detail}" if status is not None and status.state == "failed" else ""


def _last_lines(log: Path) -> tuple[str, ...]:
    try:
        return tuple(subprocesses.tail(log))
    except OSError as error:
        return (f"{log} cannot be read: {error.strerror or error}",)


def _append(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(line)


def shutdown_reason(told: Sequence[EventName]) -> End | None:
    """How an attempt ends in which this was told, in this order; None while it does not."""
    if "training_finished" in told:  # then all that a failure could prevent is done
        told = told[: told.index("training_finished") + 1]
    return next((end for event, end in ENDINGS if event in told), None)


def max_shutdown_seconds(cluster: ClusterConfig) -> float:
    """Seconds within which an agent that heard of the end is down, whatever its roles do; `lateness` comes on top where
    it waits for others."""
    return cluster.grace_seconds + 2 * cluster.stop_seconds


def role_command(context: RoleContext) -> RoleCommand:
    """How the role's own module wants to be started."""
    launch: RoleCommand = import_module(f"pipeline.roles.{context.placement.role}").launch(context)
    return launch
