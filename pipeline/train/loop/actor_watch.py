"""The trainer's view of the actor while it waits for the actor's results.

Owns the rule that bounds such a wait: it lasts as long as the episodes of the actor advance, however slow they are, and
ends when nothing has advanced for a while. An episode advances by a sampled token or a finished call of its task (a
prompt, a tool, a reward); an evaluation also by a finished prompt. A group or a result that arrives is progress too.
Whether the actor's process runs is the agent's matter (`slurm.agent`): here it is only part of the error.

Reports are compared with each other only. Their time stamps are of another node's clock, so a stamp that changes means
that the actor wrote another report, and the age of a report is measured by the clock of this process.

    watch = ActorWatch(read_report)
    watch.begin()                        # a wait begins
    …
    watch.arrived()                      # a group came
    if watch.stalled_seconds() > limit:  # neither a group nor progress since then
        raise DeadlineError("a batch", limit, watch.describe())
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeline.transport.eval_records import EVALUATED
from pipeline.transport.sample_records import SAMPLED_TOKENS, TASK_CALLS
from pipeline.utils.waiting import CLOCK, Clock

ADVANCES = (SAMPLED_TOKENS, TASK_CALLS, EVALUATED)
"""The counters of the actor's report that grow while its episodes advance.

Those of samples and of evaluations are one, also in a wait for samples: an evaluation may occupy all servers, and the
samples then stand still without a fault. It ends by its deadline or stands still too, so it hides no fault for good.
"""
LOOK_SECONDS = 1.0
"""Shortest interval between two reads of the report, which is a file on the shared disk."""
SILENT_SECONDS = 30.0
"""Age of the last report above which an error reports that the actor is gone; an actor writes one every second."""


@dataclass(frozen=True)
class ActorReport:
    """The last report of the actor.

    Attributes:
        written: the time stamp of the report, by the clock of the actor's node.
        state: the state of the role, such as `ready`.
        numbers: counters and other numbers by name.
    """

    written: float
    state: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class ActorWatch:
    """How long the actor has produced nothing and stood still."""

    def __init__(self, read: Callable[[], ActorReport | None] = lambda: None, clock: Clock = CLOCK) -> None:
        """`read` returns the actor's last report, None without one. Without reports only arrivals are progress."""
        self._read, self._clock = read, clock
        self._report: ActorReport | None = None
        self._arrived = self._advanced = self._written = clock.now()
        self._next_look = self._arrived

    def begin(self) -> None:
        """Begin a wait: what happened before does not count."""
        self.arrived()

    def arrived(self) -> None:
        """Note that a group or a result arrived."""
        self._arrived = self._clock.now()

    def stalled_seconds(self) -> float:
        """Seconds since the last arrival or the last advance of an episode, whichever is later."""
        self._look()
        return self._clock.now() - max(self._arrived, self._advanced)

    def seconds_without_arrival(self) -> float:
        """Seconds since the last arrival, whatever the actor reports."""
        return self._clock.now() - self._arrived

    def describe(self) -> str:
        """What the actor does, for the error that ends the wait."""
        if self._report is None:
            return "the actor has written no report"
        age, numbers = self._clock.now() - self._written, self._report.numbers
        if age > SILENT_SECONDS:
            return f"the actor is gone or hangs: its last report ({self._report.state}) came {age:.0f} s ago"
        tokens, calls = numbers.get(SAMPLED_TOKENS, 0), numbers.get(TASK_CALLS, 0)
        flight = f"{numbers.get('in_flight', 0):.0f} groups are in flight"
        return (
            f"the actor runs, but its episodes do not advance: {flight}, after {tokens:.0f} sampled tokens and "
            f"{calls:.0f} calls of the task; see the actor's log"
        )

    def _look(self) -> None:
        now = self._clock.now()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        report = self._read()
        if report is None or (self._report is not None and report.written == self._report.written):
            return
        # The counters of an actor that was restarted begin at zero: smaller ones are no advance.
        known: Mapping[str, float] = self._report.numbers if self._report is not None else {}
        if any(report.numbers.get(name, 0) > known.get(name, 0) for name in ADVANCES):
            self._advanced = now
        self._report, self._written = report, now
