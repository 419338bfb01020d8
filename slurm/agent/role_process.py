"""One role of a rank: its state, its process, and its deadlines.

Owns these values, and how the process is killed. `role_lifecycle` owns the transitions between states, and `supervisor`
the actions.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from pipeline.roles import RoleCommand
from pipeline.roles.role_context import PROGRESS, RoleContext
from pipeline.topology.plan import World
from pipeline.utils import subprocesses
from pipeline.utils.listeners import NO_LISTENER, listening_process
from pipeline.utils.waiting import Deadline
from slurm.agent import role_lifecycle
from slurm.agent.liveness import LivenessMonitor
from slurm.agent.recovery_policy import RECOVERY, EndKind, RestartBudget

_KILL_SECONDS = 2.0
"""Seconds that the loop waits for a killed process to exit. A slower exit is checked again at the end."""
FROZEN = "; the kernel keeps it, as if it waited for a device or a file system that is gone"


@dataclass
class SupervisedRole:
    """One role of this rank with its state and process."""

    context: RoleContext
    launch: RoleCommand
    monitor: LivenessMonitor
    state: role_lifecycle.State = "waiting"
    child: subprocesses.Child | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline("nothing", 0.0))
    reason: Deadline | None = None
    """Deadline for the published reason of a role that exited with code 0."""
    ready_at: float = 0.0
    """When its process became ready, by the supervisor's clock."""
    pause: Deadline = field(default_factory=lambda: Deadline("nothing", 0.0))
    """The pause before the next restart."""
    budget: RestartBudget = field(init=False)
    _workers: list[psutil.Process] = field(default_factory=list)
    """Of the process before: its workers that may still run. Torchrun starts each in a separate session."""

    def __post_init__(self) -> None:
        self.budget = RestartBudget.from_config(
            self.context.placement.role,
            self.context.config,
            len(self.context.world.of_role(self.context.placement.role)),
        )

    @property
    def name(self) -> str:
        return self.context.placement.name

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def down(self) -> bool:
        return self.state in ("stopped", "failed")

    @property
    def log(self) -> Path:
        """The file of the output of all its processes."""
        return self.context.paths.log(self.context.placement.role, self.context.placement.index)

    def follow(self, world: World) -> "SupervisedRole":
        """Adopt a revision of the world, which leaves this role where it is."""
        self.context = replace(self.context, world=world)
        return self

    def hand_over(self) -> None:
        """Kill the role, whose place is on another node now. That node's agent reports its further states."""
        self.kill()
        if not self.down:
            self.state = role_lifecycle.advance(self.name, self.state, "taken_over")

    def may_restart(self, kind: EndKind) -> bool:
        """Whether it is restarted after an end of this kind, before the attempt's end."""
        return self.budget.allows(kind, is_stuck=self.state == "ready" and not self._has_completed_steps())

    def _has_completed_steps(self) -> bool:
        """Whether its process has completed a step; True for a role without steps."""
        if not RECOVERY[self.context.placement.role].completes_steps:
            return True
        status = self.context.status()
        return status is not None and status.numbers.get(PROGRESS, 0) > 0

    def remember_workers(self) -> None:
        """Note, and kill, the workers of a process that has ended, before its restart.

        The agent has adopted them, so a process with another parent is a stranger that got the id of an ended worker.
        """
        self._workers = []
        for pid in self.monitor.worker_pids():
            with suppress(psutil.Error):
                worker = psutil.Process(pid)
                if worker.ppid() in (os.getpid(), self.pid):
                    self._workers.append(worker)
                    worker.kill()

    def is_gone(self) -> bool:
        """Whether no process of the role is left: neither of its group, nor a worker with a heartbeat."""
        return (self.child is None or self.child.group_is_gone()) and not any(map(_is_alive, self._workers))

    def taken_ports(self) -> str:
        """Names the listeners on the ports of a role that exited before it was ready; empty if the ports were free."""
        ports = self.context.placement.ports if self.state == "starting" else ()
        listeners = {port: listening_process(port) for port in ports}
        return "".join(f"; its port {port} is taken by {who}" for port, who in listeners.items() if who != NO_LISTENER)

    def kill(self, seconds: float = _KILL_SECONDS) -> str:
        """Kill the process group. Returns a note if the process has not exited within `seconds`, else an empty text."""
        if self.child is None:
            return ""
        self.child.kill(seconds)
        return FROZEN if self.child.poll() is None else ""


def _is_alive(process: psutil.Process) -> bool:
    """Whether the process runs. A zombie has released its memory and files once no other thread of it is left."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False
