"""What is the case in a run right now.

Owns the `Snapshot` and how it follows from what was read of a run. Pure: reads no file, asks nobody and knows no clock
(`slurm.monitor.run_watcher` does). Must not know how it is shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config import RunConfig
from pipeline.observability.run_history import Attempt
from pipeline.observability.run_status import (
    ENDED,
    State,
    current_state,
    reason_of,
    silent_ranks,
    state_of,
    training_rows,
)
from pipeline.run.events import Event
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import MetricRecord, series
from pipeline.run.run_documents import SubmittedJob
from pipeline.transport.sample_records import ASKED, EVALUATED

_RECENT = 20


@dataclass(frozen=True)
class RoleLine:
    """One role: where it is, its state, since when (seconds since the epoch; 0 before it started), a detail, and since
    when its rank is silent (0 while it is not)."""

    name: str
    rank: int
    address: str
    state: str
    since: float
    detail: str
    silent: float = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a job is: steps done of all, and the seconds left at its recent pace (None while unknown).

    `file` is the name of the file that the job is from, if it is from one.
    """

    job: str
    step: int
    steps: int
    seconds_left: float | None
    file: str = ""


@dataclass(frozen=True)
class EvaluationProgress:
    """An evaluation under way: what it is, and how many of its prompts are done.

    `first` is whether RL has not begun: then the trainer waits for it.
    """

    what: str
    done: int
    prompts: int
    first: bool


@dataclass(frozen=True)
class PastAttempt:
    """An attempt that is over: when it began (0 if no role of it ever started), for how many seconds it had roles, what
    it ended with (`requeued`, `left`, `stopped`, `finished`, `failed`, `interrupted`, or `cut off`), and why."""

    name: str
    began: float
    seconds: float
    end: str
    why: str


@dataclass(frozen=True)
class JobLine:
    """The job of a run at its scheduler.

    Attributes:
        id: as the scheduler knows it.
        restart, most_restarts: how often it was requeued before the newest attempt, and how often it may be.
        live: whether it runs or may run again; None when the scheduler was not asked, or gave no answer.
        word: the scheduler's state of it, with the reason while it waits; empty if not asked.
        trouble: why the scheduler gave no answer when it was asked; empty if it did.
    """

    id: str
    restart: int = 0
    most_restarts: int | None = None
    live: bool | None = None
    word: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run at the moment `time`.

    Attributes:
        attempt: the newest; empty before the first.
        state: of the newest attempt and its job; see `pipeline.observability.run_status`.
        job: None unless it is a scheduler's.
        began: when its first role was started; 0 before.
        roles: by rank, then in the order to start them.
        silent: since when which ranks show no sign of life.
        past: the attempts that are over, the oldest first.
        progress: of the job that trains; None before its first step.
        evaluation: that goes on, if one does.
        ahead: the progress of a run before its first step; None while its config is unreadable.
        numbers: the latest value of each number of that job.
        has_rollouts: whether the run samples, so that there are rewards; True while its config is unreadable.
        losses: of every step so far, all attempts; empty with rollouts.
        rewards: mean reward of every RL step so far, all attempts.
        accuracies: (step, held-out accuracy), all attempts.
        events: what the attempt told, by time.
        failure: the first of the attempt.
        reason: why the attempt failed or its job stopped, in one line; empty if it did neither.
    """

    name: str
    time: float
    attempt: str
    state: State
    job: JobLine | None
    began: float
    roles: tuple[RoleLine, ...]
    silent: dict[int, float]
    past: tuple[PastAttempt, ...]
    progress: Progress | None
    upcoming_phases: Progress | None
    numbers: dict[str, float]
    has_rollouts: bool
    losses: tuple[float, ...]
    rewards: tuple[float, ...]
    accuracies: tuple[tuple[int, float], ...]
    max_lag: int | None
    events: tuple[Event, ...]
    failure: FirstFailure | None
    reason: str
    evaluation: EvaluationProgress | None = None

    @property
    def ended(self) -> bool:
        """Whether the run came to an end that it does not leave by itself."""
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """Whether the attempt is, whatever becomes of the run."""
        return self.ended or self.state in ("queued", "left")

    @property
    def is_inconclusive(self) -> bool:
        """Whether only the scheduler knows if there is anything to wait for."""
        return self.job is not None and (self.state in ("queued", "left") or bool(self.silent))

    @property
    def until(self) -> float:
        """Now, or when the last role came down if the attempt is over."""
        return max((role.since for role in self.roles), default=self.time) if self.is_over else self.time


def compose_snapshot(
    name: str,
    attempt: Attempt | None,
    rows: list[MetricRecord],
    config: RunConfig | None,
    *,
    past: Sequence[PastAttempt] = (),
    submitted: SubmittedJob | None,
    finished: bool,
    alive: bool | None,
    job: JobLine | None,
    now: float,
) -> Snapshot:
    """The snapshot of what was read; pure. An attempt of an earlier job than the one `submitted` last is over."""
    newest = current_state(attempt, submitted)
    state = state_of(newest, submitted, rows, finished=finished, alive=alive)
    if attempt and (attempt.outcome or newest is None):
        past = [*past, past_of(attempt)]
    if job is not None:
        restart = newest.name.rpartition("-")[2] if newest else ""
        most = config.cluster.max_restarts if config else None
        job = replace(job, restart=int(restart) if restart.isdecimal() else 0, most_restarts=most)
    silent = silent_ranks(newest, now) if newest and state not in ENDED else {}
    return Snapshot(
        name=name,
        time=now,
        attempt=newest.name if newest else "",
        state=state,
        job=job,
        began=newest.span[0] if newest and newest.span else 0.0,
        roles=_roles(newest, silent) if newest else (),
        silent=silent,
        past=tuple(past),
        progress=_progress(rows, training_rows(newest, rows) if state == "training" else [], config),
        upcoming_phases=_ahead(config) if config else None,
        numbers=_numbers(rows),
        has_rollouts=config is None or config.has_rollouts,
        losses=() if config is None or config.has_rollouts else _losses(rows),
        rewards=tuple(value for _, value in series(rows, "reward/mean")),
        accuracies=tuple(series(rows, "eval/accuracy")),
        max_lag=config.training.max_lag if config else None,
        events=tuple(sorted(newest.events.values(), key=lambda event: event.time)) if newest else (),
        failure=newest.failure if newest else None,
        reason=reason_of(newest),
        evaluation=_evaluation(newest, rows) if newest and state not in ENDED else None,
    )


def past_of(attempt: Attempt) -> PastAttempt:
    """What is kept of an attempt that is over."""
    began, ended = attempt.span or (0.0, 0.0)
    end, why = attempt.end
    return PastAttempt(attempt.name, began, ended - began, end or "cut off", why)


def _roles(attempt: Attempt, silent: Mapping[int, float]) -> tuple[RoleLine, ...]:
    placements = {place.name: place for place in attempt.world.placements} if attempt.world else {}
    states = attempt.states
    lines = []
    for name in [*placements, *(name for name in states if name not in placements)]:
        place, last, status = placements.get(name), states.get(name), attempt.statuses.get(name)
        rank = place.rank if place else last.rank if last else -1
        detail = status.detail if status and last and last.state == "ready" else last.detail if last else ""
        lines.append(
            RoleLine(
                name=name,
                rank=rank,
                address=place.address if place else "",
                state=last.state if last else "waiting",
                since=last.time if last else 0.0,
                detail=detail,
                silent=silent.get(rank, 0.0),
            )
        )
    return tuple(sorted(lines, key=lambda line: line.rank))


def _evaluation(attempt: Attempt, rows: Sequence[MetricRecord]) -> EvaluationProgress | None:
    for status in attempt.statuses.values():
        if status.state == "ready" and ASKED in status.numbers:
            what = status.detail.partition(":")[0]
            done, prompts = int(status.numbers.get(EVALUATED, 0)), int(status.numbers[ASKED])
            return EvaluationProgress(
                what, done, prompts, not any(row["kind"] == "train" and row["job"] == "rl" for row in rows)
            )
    return None


def _progress(rows: list[MetricRecord], mine: list[MetricRecord], config: RunConfig | None) -> Progress | None:
    trained = [row for row in rows if row["kind"] == "train"]
    if not trained:
        return None
    job, step = trained[-1]["job"], trained[-1]["step"]
    if "file" in trained[-1]:
        return _progress_of_file(trained[-1], mine)
    steps = 0
    if config:
        counted = int(trained[-1].get("steps") or config.training.sft.steps)  # of epochs only the trainer knows
        steps = config.training.steps if job == "rl" else counted
    return Progress(job, step, steps, _seconds_left([row for row in mine if row["job"] == job], steps))


def _progress_of_file(last: MetricRecord, mine: list[MetricRecord]) -> Progress:
    """How far the job is that the last row is of. The rows count the steps of all jobs on."""
    same = [row for row in mine if (row.get("file"), row.get("written")) == (last["file"], last["written"])]
    left = _seconds_left(same, last["step"] - last["done"] + last["of"])
    return Progress(last["job"], last["done"], last["of"], left, last["file"])


def _ahead(config: RunConfig) -> Progress:
    first = config.training.sft.steps
    return Progress("sft", 0, first, None) if config.has_sft else Progress("rl", 0, config.training.steps, None)


def _seconds_left(mine: list[MetricRecord], steps: int) -> float | None:
    recent = mine[-_RECENT:]
    if len(recent) < 3 or recent[-1]["step"] <= recent[0]["step"]:
        return None
    pace = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
    return float(pace * max(0, steps - recent[-1]["step"]))


def _losses(rows: list[MetricRecord]) -> tuple[float, ...]:
    return tuple(row["loss"] for row in rows if row.get("loss") is not None)


def _numbers(rows: list[MetricRecord]) -> dict[str, float]:
    """The last training row's numbers."""
    last = next((row for row in reversed(rows) if row["kind"] == "train"), {})
    return {name: value for name, value in last.items() if isinstance(value, float) and name != "time"}
