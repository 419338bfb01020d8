"""One role of a rank, as its supervisor sees it: its state, its process, and its deadlines.

Owns these facts, and how the process is ended. Which state may follow another is in `lifecycle`; what is done about it
is in `supervisor`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.utils import subprocesses
from pipeline.utils.listeners import NO_LISTENER, listening_process
from pipeline.utils.waiting import Deadline, exponential_pauses
from slurm.agent import role_lifecycle
from slurm.agent.liveness import LivenessMonitor

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the first restart of a server, and before any later one."""
_KILL_SECONDS = 2.0
"""How long the loop waits for the kernel to end a role; one that takes longer is checked again at the end."""
FROZEN = "; the kernel keeps it, as if it waited for a device or a file system that is gone"


@dataclass
class SupervisedRole:
    """One role of this rank and where it is in its life."""

    context: RoleContext
    launch: RoleCommand
    vitals: LivenessMonitor
    state: role_lifecycle.State = "waiting"
    child: subprocesses.Child | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline("nothing", 0.0))
    reason: Deadline | None = None
    """Until when it may show why the role, which has ended with exit code 0, did so."""
    replaced: int = 0
    """How often its process was replaced."""
    pauses: Iterator[float] = field(default_factory=lambda: exponential_pauses(FIRST_PAUSE, LONGEST_PAUSE))
    pause: Deadline = field(default_factory=lambda: Deadline("nothing", 0.0))
    """Until when it is not started again."""

    @property
    def name(self) -> str:
        return self.context.placement.name

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def down(self) -> bool:
        return self.state in ("stopped", "failed")

    def taken_ports(self) -> str:
        """Words about who listens on the ports of a role that ended before it was ready: it could not."""
        ports = self.context.placement.ports if self.state == "starting" else ()
        listeners = {port: listening_process(port) for port in ports}
        return "".join(f"; its port {port} is taken by {who}" for port, who in listeners.items() if who != NO_LISTENER)

    def kill(self, seconds: float = _KILL_SECONDS) -> str:
        """End it; words about it if the kernel has not let it go within `seconds`."""
        if self.child is None:
            return ""
        self.child.kill(seconds)
        return FROZEN if self.child.poll() is None else ""
