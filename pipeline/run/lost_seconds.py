"""The goodput of a run: the part of its wall time that trained the final model, and the causes of all other seconds.

Source: Google Cloud, *ML Productivity Goodput* (2024), whose library ml-goodput-measurement divides a job's wall time
in the same way. Pure: `pipeline.run.goodput_records` reads the run directory.

    wall = useful + the seconds of each cause

    --step--|--step--|~~~~x.....|......|.....|.....|......|.......|.......|.....|--step--|
            |        cut   detec- shut-  re-   agent, trainer restore servers batch
                     off   tion   down   queue meet                   weights

The time between two steps of one trainer process is *useful*; if a later restore drops the second step, it is
*retrained*. Before the first step of a process, the time is divided at the marks that agents and trainer leave. While
another role is away, the trainer continues: of each step, the seconds beyond the median are counted for that role.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from pipeline.run.fault_plan import FAULT
from pipeline.run.transitions import Transition

CAUSES = (
    *("detection", "shutdown", "requeue", "agent", "rendezvous", "trainer", "restore", "servers", "weights", "batch"),
    *("retrained", "other"),
)
"""The causes of lost seconds, in the order of a restart. docs/goodput.md has the meaning of each."""
_DOWN = ("detection", "shutdown", "requeue")


@dataclass(frozen=True)
class StepTime:
    """One trained step.

    Attributes:
        time: its end, in seconds since the epoch.
        dropped: whether a later restore dropped it.
        seconds, data: its duration, and how much of that it waited for its batch.
        begin: of the first step of a job in a process: how long the servers were awaited before. Else None.
        restore: of the first step of a process: the seconds of the restore before. Else None.
    """

    time: float
    job: str
    attempt: str
    dropped: bool = False
    seconds: float = 0.0
    data: float = 0.0
    begin: float | None = None
    restore: float | None = None


@dataclass(frozen=True)
class AttemptTimes:
    """One attempt.

    Attributes:
        began: when its first agent's interpreter was started.
        met: when that agent published its node record; None if unknown.
        transitions: of its roles, in order of time.
        stops: time and reason of each event that ended it early.
    """

    name: str
    began: float
    met: float | None
    transitions: tuple[Transition, ...]
    stops: tuple[tuple[float, str], ...] = ()


@dataclass
class Outage:
    """One fault, failure or stop request.

    Attributes:
        what: the fault, or the reason of the end.
        seconds: the lost seconds by cause.
        resumed: the end of the next step; None if there is none.
    """

    what: str
    time: float
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: float | None = None

    @property
    def gap(self) -> float | None:
        """Seconds until the end of the next step."""
        return None if self.resumed is None else self.resumed - self.time


@dataclass(frozen=True)
class Goodput:
    """The wall seconds of a run. Invariant: `wall` = `useful` + the sum of `seconds`, up to rounding.

    Attributes:
        restarts: attempts after the first, and restarts in place.
        seconds: the lost seconds by cause, all of `CAUSES`.
        start: the lost seconds before the first step, and before the first one of RL after SFT.
    """

    wall: float
    useful: float
    restarts: int
    seconds: dict[str, float]
    start: Outage
    outages: tuple[Outage, ...]

    @property
    def ratio(self) -> float:
        """Useful seconds per wall second."""
        return self.useful / self.wall if self.wall > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The numbers of a row of `metrics.jsonl`."""
        lost = {f"goodput/{cause}_seconds": seconds for cause, seconds in self.seconds.items()}
        return {
            "goodput/ratio": self.ratio,
            "goodput/wall_seconds": self.wall,
            "goodput/useful_seconds": self.useful,
            "goodput/restarts": float(self.restarts),
        } | lost


@dataclass(frozen=True)
class _Mark:
    """The seconds after `time` have the cause `cause`. `what` describes a mark that may begin an outage."""

    time: float
    cause: str
    attempt: str = ""
    role: str = ""
    what: str = ""


def goodput(attempts: Sequence[AttemptTimes], steps: Iterable[StepTime], until: float = 0.0) -> Goodput | None:
    """Divide the wall time from the first attempt's begin to `until`, or to the last record if that is later.

    None for a run without an attempt.
    """
    if not attempts:
        return None
    ordered = sorted(steps, key=lambda step: step.time)
    last = [attempt.transitions[-1].time for attempt in attempts if attempt.transitions]
    end = max([until, *last, *(step.time for step in ordered[-1:])])
    return _Walk(attempts, ordered).run(max(end, attempts[0].began))


class _Walk:
    """One pass over the wall time, step by step."""

    def __init__(self, attempts: Sequence[AttemptTimes], steps: Sequence[StepTime]) -> None:
        self._attempts, self._steps = attempts, steps
        self._began = attempts[0].began
        marks = [mark for attempt in attempts for mark in _marks_of(attempt)]
        ends = [_end_of(attempt, steps) for attempt in attempts[:-1]]
        self._marks = sorted([*marks, *ends], key=lambda mark: mark.time)
        self._away = [outage for attempt in attempts for outage in _absences(attempt)]
        self._typical = _typical_seconds(steps)
        self._ready = {attempt.name: _ready_times(attempt) for attempt in attempts}
        self._useful, self._lost = 0.0, dict.fromkeys(CAUSES, 0.0)
        self._start = Outage("start", self._began)
        self._outages: list[Outage] = []
        self._current: Outage | None = self._start
        self._retrained = 0.0

    def run(self, end: float) -> Goodput:
        before: StepTime | None = None
        for step in self._steps:
            begun = before.time if before else self._began
            if before is None or step.attempt != before.attempt or step.restore is not None:
                self._restart(begun, step, before)
            elif step.begin is not None:
                # The first start includes that of RL after SFT.
                self._current = None if self._outages else self._start
                self._divide(begun, step.time, [*self._marks_of_start(step), _end_of_start(step)], "other")
                self._current = None
            else:
                self._continue(begun, step)
            before = step
        self._finish(before, end)
        restarts = (
            len(self._attempts)
            - 1
            + sum(line.state == "restarting" for attempt in self._attempts for line in attempt.transitions)
        )
        outages = tuple(sorted(self._outages, key=lambda outage: outage.time))
        return Goodput(end - self._began, self._useful, restarts, self._lost, self._start, outages)

    def _restart(self, begun: float, step: StepTime, before: StepTime | None) -> None:
        """The time before the first step of a trainer process, and that step."""
        own = self._marks_of_start(step)
        marks = [mark for mark in self._between(begun, step.time) if _interrupts(mark, step.attempt)]
        marks = [mark for mark in marks if mark.time <= own[0].time] + own + [_end_of_start(step)]
        self._divide(begun, step.time, marks, self._carried(begun, before) if before else "agent")
        if self._current is not None:
            self._current.resumed = step.time
        self._current = None

    def _carried(self, begun: float, before: StepTime) -> str:
        """The cause at the end of a process's last step: a stop request may have come before it."""
        stops = [mark for mark in self._marks if mark.time <= begun and mark.attempt == before.attempt]
        if stops and stops[-1].cause in ("shutdown", "requeue"):
            self._open(stops[-1])
            return stops[-1].cause
        return "retrained"

    def _continue(self, begun: float, step: StepTime) -> None:
        """A step by the same process as the step before it."""
        seconds = step.time - begun
        if step.dropped:
            self._lost["retrained"] += seconds
            self._retrained += seconds
            return
        absence = next((away for away in self._away if away.began < step.time and away.ended > begun), None)
        excess = max(0.0, seconds - self._typical.get(step.job, seconds)) if absence else 0.0
        self._useful += seconds - excess
        if absence is None:
            return
        self._lost[absence.cause] += excess
        outage = next((outage for outage in self._outages if outage.time == absence.began), None)
        if outage is None:
            outage = Outage(absence.what, absence.began, resumed=step.time)
            self._outages.append(outage)
        outage.seconds[absence.cause] = outage.seconds.get(absence.cause, 0.0) + excess

    def _divide(self, begun: float, end: float, marks: Sequence[_Mark], cause: str) -> None:
        """Divide a time at the marks; the seconds before the first one have the given cause."""
        at = begun
        for mark in marks:
            time = min(max(mark.time, at), end)
            self._spend(cause, time - at)
            if mark.what and not (cause in _DOWN and mark.cause in ("shutdown", "requeue")):
                self._open(mark)
            at, cause = time, mark.cause
        self._spend(cause, end - at)

    def _spend(self, cause: str, seconds: float) -> None:
        if cause == "useful":
            self._useful += seconds
            return
        self._lost[cause] += seconds
        if cause == "retrained":
            self._retrained += seconds  # it precedes the outage that dropped it
        elif self._current is not None and seconds > 0:
            self._current.seconds[cause] = self._current.seconds.get(cause, 0.0) + seconds

    def _open(self, mark: _Mark) -> None:
        self._current = Outage(mark.what, mark.time)
        if self._retrained:
            self._current.seconds["retrained"], self._retrained = self._retrained, 0.0
        self._outages.append(self._current)

    def _finish(self, before: StepTime | None, end: float) -> None:
        """The time after the last step."""
        begun = before.time if before else self._began
        cause = self._carried(begun, before) if before else "agent"
        newest = self._attempts[-1]
        alive = "" if newest.stops else newest.name  # in which a fault of another role interrupts nothing
        marks = [mark for mark in self._between(begun, end) if _interrupts(mark, alive)]
        if cause == "retrained" and not marks:
            cause = "other"
        self._divide(begun, end, marks, cause)

    def _marks_of_start(self, step: StepTime) -> list[_Mark]:
        """The marks before the first step of a process or of a job, which are later than all others of its process."""
        started = step.time - step.seconds
        waited = started - (step.begin or 0.0)
        restored = waited - (step.restore or 0.0)
        weights = max([waited, *(time for time in self._ready.get(step.attempt, ()) if time <= started)])
        marks = [_Mark(restored, "restore")] if step.restore is not None else []
        return [*marks, _Mark(waited, "servers"), _Mark(weights, "weights"), _Mark(started, "batch")]

    def _between(self, begun: float, end: float) -> list[_Mark]:
        first = bisect_right(self._marks, begun, key=lambda mark: mark.time)
        return self._marks[first : bisect_right(self._marks, end, key=lambda mark: mark.time)]


def _end_of(attempt: AttemptTimes, steps: Sequence[StepTime]) -> _Mark:
    """The mark at the end of an attempt that another one followed: its last record. A killed attempt has few."""
    last = [step.time for step in steps if step.attempt == attempt.name]
    end = max([attempt.began, *last, *(line.time for line in attempt.transitions[-1:])])
    return _Mark(end, "requeue", attempt.name, what=f"attempt {attempt.name} ended")


def _marks_of(attempt: AttemptTimes) -> Iterator[_Mark]:
    """The marks that agents leave."""
    name = attempt.name
    yield _Mark(attempt.began, "agent", name)
    if attempt.met is not None:
        yield _Mark(attempt.met, "rendezvous", name)
    for line in attempt.transitions[:1]:
        yield _Mark(line.time, "trainer", name)
    yield from filter(None, (_mark_of(line, name) for line in attempt.transitions))
    for time, why in attempt.stops:
        yield _Mark(time, "shutdown", name, what=why)


def _mark_of(line: Transition, attempt: str) -> _Mark | None:
    """The mark of a line of a timeline; None for a line after which the seconds have the same cause."""
    failure = f"{line.role}: {line.detail}"
    if line.state == FAULT:
        return _Mark(line.time, "detection", attempt, line.role, line.detail)
    if line.state == "failed":
        return _Mark(line.time, "shutdown", attempt, line.role, failure)
    if _is_trainer(line.role) and line.state == "restarting":
        return _Mark(line.time, "requeue", attempt, line.role, failure)
    if _is_trainer(line.role) and line.state == "starting":
        return _Mark(line.time, "trainer", attempt, line.role)
    return None


def _ready_times(attempt: AttemptTimes) -> list[float]:
    """When a server was ready."""
    return [line.time for line in attempt.transitions if line.role.startswith("inference") and line.state == "ready"]


def _end_of_start(step: StepTime) -> _Mark:
    """From here on the step is trained."""
    return _Mark(step.time - step.seconds + step.data, "retrained" if step.dropped else "useful")


def _interrupts(mark: _Mark, attempt: str) -> bool:
    """Whether the mark is of the trainer's own interruption: a fault of another role is, if it ended its attempt."""
    return mark.cause != "detection" or _is_trainer(mark.role) or mark.attempt != attempt


def _is_trainer(role: str) -> bool:
    return role.partition(".")[0] == "trainer"


@dataclass(frozen=True)
class _Absence:
    """A role other than the trainer was away, from its fault until it was ready again."""

    began: float
    ended: float
    what: str
    cause: str


def _absences(attempt: AttemptTimes) -> Iterator[_Absence]:
    open_: dict[str, tuple[float, str]] = {}
    for line in attempt.transitions:
        if _is_trainer(line.role):
            continue
        if line.state in (FAULT, "restarting"):
            what = line.detail if line.state == FAULT else f"{line.role}: {line.detail}"
            open_.setdefault(line.role, (line.time, what))
        elif line.state in ("ready", "failed", "stopped") and line.role in open_:
            began, what = open_.pop(line.role)
            yield _Absence(began, line.time, what, "servers" if line.role.startswith("inference") else "batch")


def _typical_seconds(steps: Sequence[StepTime]) -> dict[str, float]:
    """The median time between two steps of one trainer process, by job."""
    seconds: dict[str, list[float]] = {}
    for before, step in pairwise(steps):
        if step.attempt == before.attempt and step.begin is None and step.restore is None:
            seconds.setdefault(step.job, []).append(step.time - before.time)
    return {job: median(values) for job, values in seconds.items()}
