"""Runs the roles of one rank, from the world to a clean end.

Owns starting, watching and stopping this rank's roles. Promises that the first failure on any rank stops every role of
every rank within `stop_seconds`, that an orderly end comes down in the order of `lifecycle.DESCENT`, and that when
`run` returns nothing it started is alive. Must not know what a role does.

    end = Supervisor(contexts, f"agent.{rank}", paths, config.cluster).run()
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

import msgspec

from pipeline import files, process
from pipeline.events import EventName, Events
from pipeline.failure import FirstFailure
from pipeline.paths import AttemptPaths
from pipeline.places import ClusterConfig
from pipeline.plan import Placement
from pipeline.roles import Launch
from pipeline.roles.context import RoleContext
from pipeline.waiting import CLOCK, Clock, Deadline
from slurm import lifecycle
from slurm.environment import child_environment

End = Literal["finished", "preempted", "failed"]
ENDINGS: tuple[tuple[EventName, End], ...] = (
    ("failed", "failed"),
    ("training_finished", "finished"),
    ("draining", "preempted"),
)
"""Which event means which end, the strongest first."""

POLL_SECONDS = 0.1
_LEAST_TIME_TO_STOP = 0.5


@dataclass
class Supervised:
    """One role of this rank and where it is in its life."""

    context: RoleContext
    launch: Launch
    state: lifecycle.State = "waiting"
    child: process.Child | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline("nothing", 0.0))

    @property
    def name(self) -> str:
        return self.context.placement.name

    @property
    def down(self) -> bool:
        return self.state in ("stopped", "failed")


@dataclass
class Notice:
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
        notice: Notice,
        clock: Clock = CLOCK,
    ) -> None:
        """`contexts` are this rank's roles in the order to start them; `name` is the agent's own."""
        self._name, self._paths, self._events, self._cluster = name, paths, Events(paths), cluster
        self._notice, self._clock = notice, clock
        self._roles = [Supervised(context, launch_of(context)) for context in contexts]
        self._end: End | None = None
        self._ending_since = 0.0

    def run(self) -> End:
        """Start all roles and return how the attempt ended on this rank, when everything here is down."""
        try:
            for role in self._roles:
                self._start(role)
            while not (self._end and all(role.down for role in self._roles)):
                self._step()
                self._clock.sleep(POLL_SECONDS)
            self._listen()
        finally:
            for role in self._roles:
                if role.child is not None:
                    role.child.kill()
        return self._end

    def _step(self) -> None:
        if self._notice.reason and not self._events.seen("draining"):
            self._events.publish("draining", self._name, self._notice.reason)
        self._listen()
        for role in self._roles:
            if not role.down:
                self._watch(role)
        if self._end is not None:
            self._descend()

    def _listen(self) -> None:
        """Learn how the attempt ends; a failure overrides an orderly end until the roles are down."""
        told = next((end for event, end in ENDINGS if self._events.seen(event)), None)
        if told is not None and told != self._end:
            self._end, self._ending_since = told, self._clock.now()

    def _start(self, role: Supervised) -> None:
        context = role.context
        log = self._paths.log(context.placement.role, context.placement.index)
        role.child = process.Child(role.launch.argv, log, child_environment(role.launch.env))
        role.deadline = Deadline(f"{role.name} to become ready", self._cluster.startup_seconds, self._clock)
        self._advance(role, "start")

    def _watch(self, role: Supervised) -> None:
        code = role.child.poll() if role.child else None
        if code is not None:
            self._ended(role, code)
        elif role.state == "starting" and role.launch.ready():
            self._advance(role, "became_ready")
        elif role.state == "starting" and role.deadline.passed:
            self._failed(role, "overslept", str(role.deadline.error()), None)
        elif role.state == "stopping" and role.deadline.passed:
            self._kill(role)

    def _ended(self, role: Supervised, code: int) -> None:
        self._listen()
        if role.state == "stopping":
            self._advance(role, "ended", process.describe_exit(code))
        elif self._end is not None and code == 0:
            self._advance(role, "finished")
        else:
            self._failed(role, "died", f"{process.describe_exit(code)}{_own_words(role)}", code)

    def _failed(self, role: Supervised, happening: lifecycle.Happening, cause: str, code: int | None) -> None:
        """Record the first failure of the attempt, and end what is left of the role.

        While an attempt comes down, only the trainer's failure still counts: it was to commit.
        """
        if role.child is not None:
            role.child.kill()
        log = self._paths.log(role.context.placement.role, role.context.placement.index)
        failure = FirstFailure(
            role=role.name,
            rank=role.context.placement.rank,
            cause=cause,
            exit_code=code,
            time=time.time(),
            log=str(log),
            last_lines=tuple(process.tail(log)),
        )
        ends_the_run = self._end is None or (self._end == "preempted" and role.context.placement.role == "trainer")
        if ends_the_run:
            files.create_document(self._paths.first_failure, failure)
            self._events.publish("failed", role.name, failure.one_line())
        self._advance(role, happening, cause)

    def _descend(self) -> None:
        """Ask those roles to stop whose turn has come."""
        for role in self._roles:
            if role.state in ("waiting", "starting", "ready") and self._may_stop(role):
                self._advance(role, "asked_to_stop")
                role.deadline = Deadline(f"{role.name} to stop", self._time_to_stop(), self._clock)
                if role.child is not None:
                    role.child.terminate()

    def _may_stop(self, role: Supervised) -> bool:
        if self._end == "failed":
            return True
        placement = role.context.placement
        if self._ending_for() > self._patience(lifecycle.stage_of(placement.role)):
            return True
        if placement.role == "trainer":
            return role.state == "starting"  # once it is ready it commits and ends by itself
        before = lifecycle.must_wait_for(placement, role.context.world)
        return all(is_down(self._paths, other) for other in before)

    def _ending_for(self) -> float:
        return self._clock.now() - self._ending_since

    def _patience(self, stage: int) -> float:
        """Seconds after which a role is asked to stop although others, before it in the descent, are still up."""
        stop = self._cluster.stop_seconds
        trainer = self._cluster.grace_seconds if self._end == "preempted" else stop / 2
        return trainer + (stage - 1) * stop / 2 if stage else 0.0

    def _time_to_stop(self) -> float:
        """Seconds between asking a role to stop and ending it: less for those whose turn came late."""
        stop = self._cluster.stop_seconds
        last_call = self._patience(len(lifecycle.DESCENT) - 1) + stop / 2
        return max(_LEAST_TIME_TO_STOP, min(stop, last_call - self._ending_for()))

    def _kill(self, role: Supervised) -> None:
        if role.child is not None:
            role.child.kill()
        self._advance(role, "ended", f"killed after {role.deadline.seconds:g} s")

    def _advance(self, role: Supervised, happening: lifecycle.Happening, detail: str = "") -> None:
        role.state = lifecycle.advance(role.name, role.state, happening)
        rank = role.context.placement.rank
        line = {"time": time.time(), "role": role.name, "rank": rank, "state": role.state, "detail": detail}
        self._paths.timeline.mkdir(parents=True, exist_ok=True)
        with (self._paths.timeline / f"rank-{rank}.jsonl").open("ab") as timeline:
            timeline.write(msgspec.json.encode(line) + b"\n")
        if role.down:
            files.write_document(self._paths.down(role.name), role.state)


def _own_words(role: Supervised) -> str:
    """What the role itself said of its failure, if it could."""
    status = role.context.status()
    return f": {status.detail}" if status is not None and status.state == "failed" else ""


def longest_descent(cluster: ClusterConfig) -> float:
    """Seconds within which an attempt that was told to end is down, whatever its roles do."""
    return cluster.grace_seconds + 2 * cluster.stop_seconds


def is_down(paths: AttemptPaths, placement: Placement) -> bool:
    """Whether a role is down, or its agent has left and nothing of it can be up."""
    return paths.down(placement.name).exists() or paths.down(f"agent.{placement.rank}").exists()


def launch_of(context: RoleContext) -> Launch:
    """How the role's own module wants to be started."""
    launch: Launch = import_module(f"pipeline.roles.{context.placement.role}").launch(context)
    return launch
