"""One version that is being sent to servers: the servers it waits for, and the result of each one's last attempt.

Owns the rule which servers a version waits for, and the pause before a server is tried again. Must not know threads or
transports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.inference.weight_sync.server_sync import RESUME_SECONDS, ServerSync
from pipeline.inference.weight_sync.weight_snapshot import WeightSnapshot
from pipeline.utils.waiting import Deadline

FIRST_RETRY, LONGEST_RETRY = 0.25, 5.0
UNREACHABLE_RETRY = 0.5
"""Pause before the next connection to a server where nobody listens: it may start up, and a refused connection costs
nearly nothing."""


@dataclass(frozen=True)
class SyncReport:
    """The result of one weight sync.

    Attributes:
        version: the policy version.
        seconds: how long the caller was blocked, in `take` and `wait_until_synced` together.
        servers: seconds of each updated server, by `host:port`.
        failures: the reason for each evicted server.
        phases: for each updated server, the seconds of each part of its update (`ServerSync.phases`).
    """

    version: int
    seconds: float
    servers: dict[str, float]
    failures: dict[str, str]
    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    def slowest(self) -> dict[str, float]:
        """For each part of an update, the seconds of the slowest server."""
        parts = [(phase, seconds) for phases in self.phases.values() for phase, seconds in phases.items()]
        return {phase: max(seconds for name, seconds in parts if name == phase) for phase, _ in parts}


@dataclass
class ServerSlot:
    """A server's state machine, the version that is being sent to it, and the result of its last attempt.

    Attributes:
        leaving: whether no further version is sent to the server, nor waited for.
    """

    link: ServerSync
    busy: int | None = None
    attempted_version: int = -1
    attempts: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    failures: int = 0
    retry: Deadline = field(default_factory=lambda: Deadline("a retry", 0.0))
    leaving: bool = False

    @property
    def live(self) -> bool:
        return self.link.state in ("current", "updating")

    def needs_update(self, payload: WeightSnapshot | None) -> bool:
        """Whether the server has other weights than these and may be updated now."""
        return payload is not None and self.link.version != payload.version and self.retry.passed

    def note(self, version: int, seconds: float, failure: str, *, unreachable: bool = False) -> None:
        self.attempted_version, self.seconds, self.failure = version, seconds, failure
        self.phases = self.link.phases
        self.attempts += 1
        if not failure:
            self.failures, pause = 0, 0.0
        elif unreachable:
            pause = UNREACHABLE_RETRY
        else:
            self.failures += 1
            pause = min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(self.failures, 10))
        self.retry = Deadline("a retry", pause)


class SyncRound:
    """One version being sent: the servers that were current when it was taken, and their deadline."""

    def __init__(self, version: int, slots: Sequence[ServerSlot], update_seconds: float) -> None:
        self.version, self.blocking_seconds = version, 0.0
        self._before = [(slot, slot.attempts) for slot in slots if slot.live]
        # A server that is still busy with the version before may use two deadlines: one for each version.
        attempts = 2 if any(slot.link.state == "updating" for slot in slots) else 1
        seconds = attempts * (update_seconds + 2 * RESUME_SECONDS)
        self._deadline = Deadline(f"weights {version} on every server", seconds)

    @property
    def over(self) -> bool:
        """Whether every awaited server ended its attempt, or failed at the version before, or the deadline passed."""
        return self._deadline.passed or all(self._tried(slot, before) for slot, before in self._before)

    def failures(self) -> dict[str, str]:
        """Why the awaited servers do not have the weights."""
        late = "did not end within the deadline"
        return {
            slot.link.server: (slot.failure or "lost its weights") if self._tried(slot, before) else late
            for slot, before in self._before
            if slot.link.version != self.version and not slot.leaving
        }

    def _tried(self, slot: ServerSlot, before: int) -> bool:
        return slot.leaving or slot.attempted_version == self.version or (slot.attempts > before and bool(slot.failure))
