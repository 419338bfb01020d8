"""What is the case in a run right now.

Owns the `Snapshot` and how it follows from the files of a run. Promises that it can be taken at any moment of a run's
life, from any machine that sees the directory. Must not know how it is shown.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline import files
from pipeline.config import RunConfig
from pipeline.events import Event
from pipeline.failure import FirstFailure
from pipeline.metrics import Row, RowReader, series
from pipeline.paths import RunPaths
from pipeline.records import Finished, RunIdentity
from pipeline.report.history import Attempt, attempt_names, read_attempt, read_config
from slurm import runs

State = Literal[
    "waiting", "meeting", "starting", "training", "finishing", "stopping", "interrupted", "failed", "finished"
]
ENDED: tuple[State, ...] = ("interrupted", "failed", "finished")
_RECENT = 20


@dataclass(frozen=True)
class RoleLine:
    """One role: where it is, its state, since when (seconds since the epoch; 0 before it started), and a detail."""

    name: str
    rank: int
    address: str
    state: str
    since: float
    detail: str


@dataclass(frozen=True)
class Progress:
    """How far a job is: steps done of all, and the seconds left at its recent pace (None while unknown)."""

    job: str
    step: int
    steps: int
    seconds_left: float | None


@dataclass(frozen=True)
class Snapshot:
    """A run at the moment `time`.

    Attributes:
        state: of the newest attempt; see `state_of`.
        began: when its first role was started; 0 before.
        roles: by rank, then in the order to start them.
        progress: of the job that trains; None before its first step.
        numbers: the latest value of each number of that job.
        rewards: mean reward of every RL step so far, all attempts.
        accuracies: (step, held-out accuracy), all attempts.
        events: what the attempt told, by time.
    """

    name: str
    time: float
    attempt: str
    state: State
    began: float
    roles: tuple[RoleLine, ...]
    progress: Progress | None
    numbers: dict[str, float]
    rewards: tuple[float, ...]
    accuracies: tuple[tuple[int, float], ...]
    max_lag: int | None
    events: tuple[Event, ...]
    failure: FirstFailure | None

    @property
    def ended(self) -> bool:
        """Whether the attempt came to an end that it cannot leave."""
        return self.state in ENDED

    @property
    def until(self) -> float:
        """Now, or when the last role came down if the attempt ended."""
        return max((role.since for role in self.roles), default=self.time) if self.ended else self.time


class Watcher:
    """Takes snapshots of one run and reads each metrics row only once."""

    def __init__(self, root: Path, attempt: str = "") -> None:
        """`attempt` is the one to look at, also before it exists; empty: always the newest."""
        self._run, self._attempt = RunPaths(root), attempt
        self._rows = RowReader(self._run.metrics)
        self._config: RunConfig | None = None

    def look(self) -> Snapshot:
        """The run as it is now."""
        self._rows.read()
        self._config = self._config or read_config(self._run)
        identity = files.read_document(self._run.run, RunIdentity)
        name = self._attempt or next(reversed(attempt_names(self._run)), "")
        attempt = read_attempt(self._run.attempt(identity.run_id if identity else "unknown", name)) if name else None
        finished = files.read_document(self._run.finished, Finished)
        return compose(
            self._run.root.name,
            attempt,
            self._rows.rows,
            self._config,
            finished=finished is not None,
            alive=runs.has_job(self._run),
            now=time.time(),
        )


def snapshot(run_dir: Path) -> Snapshot:
    """The run as it is now, its newest attempt."""
    return Watcher(run_dir).look()


def compose(
    name: str,
    attempt: Attempt | None,
    rows: list[Row],
    config: RunConfig | None,
    *,
    finished: bool,
    alive: bool,
    now: float,
) -> Snapshot:
    """The snapshot of what was read; pure."""
    mine = [row for row in rows if row["kind"] == "train" and attempt and row.get("attempt") == attempt.name]
    state = state_of(attempt, bool(mine), finished, alive)
    return Snapshot(
        name=name,
        time=now,
        attempt=attempt.name if attempt else "",
        state=state,
        began=attempt.transitions[0].time if attempt and attempt.transitions else 0.0,
        roles=_roles(attempt) if attempt else (),
        progress=_progress(rows, mine if state == "training" else [], config),
        numbers=_numbers(rows),
        rewards=tuple(value for _, value in series(rows, "reward/mean")),
        accuracies=tuple(series(rows, "eval/accuracy")),
        max_lag=config.training.max_lag if config else None,
        events=tuple(sorted(attempt.events.values(), key=lambda event: event.time)) if attempt else (),
        failure=attempt.failure if attempt else None,
    )


def state_of(attempt: Attempt | None, trains: bool, finished: bool, alive: bool = True) -> State:
    """Where an attempt is in its life; the strongest sign decides, and an end counts over everything on the way.

    One that told no end and has no job any more (`alive` is False) was interrupted, whatever it was doing.
    """
    if finished:
        return "finished"
    if attempt is None:
        return "waiting"
    if attempt.failure or "failed" in attempt.events:
        return "failed"
    if not alive:
        return "interrupted"
    if "training_finished" in attempt.events:
        return "finishing"
    if "draining" in attempt.events:
        return "interrupted" if attempt.is_down else "stopping"
    if trains:
        return "training"
    return "starting" if attempt.transitions or attempt.world else "meeting"


def _roles(attempt: Attempt) -> tuple[RoleLine, ...]:
    placements = {place.name: place for place in attempt.world.placements} if attempt.world else {}
    states = attempt.states
    lines = []
    for name in [*placements, *(name for name in states if name not in placements)]:
        place, last, status = placements.get(name), states.get(name), attempt.statuses.get(name)
        detail = status.detail if status and last and last.state == "ready" else last.detail if last else ""
        lines.append(
            RoleLine(
                name=name,
                rank=place.rank if place else last.rank if last else -1,
                address=place.address if place else "",
                state=last.state if last else "waiting",
                since=last.time if last else 0.0,
                detail=detail,
            )
        )
    return tuple(sorted(lines, key=lambda line: line.rank))


def _progress(rows: list[Row], mine: list[Row], config: RunConfig | None) -> Progress | None:
    trained = [row for row in rows if row["kind"] == "train"]
    if not trained:
        return None
    job, step = trained[-1]["job"], trained[-1]["step"]
    steps = 0
    if config:
        steps = config.training.steps if job == "rl" else config.training.warm_start.steps
    return Progress(job, step, steps, _seconds_left([row for row in mine if row["job"] == job], steps))


def _seconds_left(mine: list[Row], steps: int) -> float | None:
    recent = mine[-_RECENT:]
    if len(recent) < 3 or recent[-1]["step"] <= recent[0]["step"]:
        return None
    pace = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
    return float(pace * max(0, steps - recent[-1]["step"]))


def _numbers(rows: list[Row]) -> dict[str, float]:
    """The last training row's numbers."""
    last = next((row for row in reversed(rows) if row["kind"] == "train"), {})
    return {name: value for name, value in last.items() if isinstance(value, float) and name != "time"}
