"""The state of a run at one time.

Owns the `Snapshot` and its derivation from the run's records. Pure: reads no file, scheduler or clock, which
`slurm.monitor.run_watcher` does. Must not know the rendering.
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
from pipeline.run.notices import Notice
from pipeline.run.run_documents import SubmittedJob
from pipeline.transport.eval_records import ASKED, EVALUATED

_RECENT = 20
_NEEDED = (
    *("kind", "job", "step", "time", "attempt", "steps", "file", "written", "done", "of"),
    *("loss", "reward/mean", "eval/accuracy"),
)
"""The values that a snapshot needs of rows before the newest training row."""


@dataclass(frozen=True)
class RoleLine:
    """The state of one role.

    Attributes:
        since: start of the state, in seconds since the epoch; 0 before the role started.
        silent: since when its rank has no heartbeat, in seconds since the epoch; 0 while it has one.
        restarts: the reason of each restart in place, the oldest first.
        attached: the number of the attached job to which it belongs; 0 for a role of the run's own job.
    """

    name: str
    rank: int
    address: str
    state: str
    since: float
    detail: str
    silent: float = 0.0
    restarts: tuple[str, ...] = ()
    attached: int = 0


@dataclass(frozen=True)
class Progress:
    """The progress of a training job: completed and total steps, and the seconds left (None while unknown).

    `file` is the name of its job file, if it has one.
    """

    job: str
    step: int
    steps: int
    seconds_left: float | None
    file: str = ""


@dataclass(frozen=True)
class EvaluationProgress:
    """A running evaluation: its label, and its completed and total prompts.

    `first` is whether RL has no step yet.
    """

    what: str
    done: int
    prompts: int
    first: bool


@dataclass(frozen=True)
class PastAttempt:
    """An ended attempt.

    Attributes:
        began: the start of its first role; 0 if no role started.
        seconds: the time during which it had roles.
        end: `requeued`, `left`, `stopped`, `finished`, `failed`, `interrupted`, or `cut off`.
        why: the reason of the end.
    """

    name: str
    began: float
    seconds: float
    end: str
    why: str


@dataclass(frozen=True)
class JobLine:
    """The job of a run at its scheduler.

    Attributes:
        id: the scheduler's id of the job.
        scheduler: the scheduler's name.
        restart, most_restarts: the requeues before the newest attempt, and their limit.
        live: whether the job runs or may run again; None without an answer of the scheduler.
        word: the scheduler's state of the job, with the reason while it is pending; empty without an answer.
        trouble: why the scheduler did not answer; empty if it did, or was not queried.
    """

    id: str
    scheduler: str
    restart: int = 0
    most_restarts: int | None = None
    live: bool | None = None
    word: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run at the moment `time`.

    Attributes:
        attempt: the newest attempt; empty before the first.
        state: the state of the newest attempt and its job; see `pipeline.observability.run_status`.
        job: the scheduler's job; None for a local run.
        began: the start of the attempt's first role; 0 before.
        roles: by rank, then in start order; the servers of attached jobs are last.
        silent: the ranks without a heartbeat, with the time of their last one.
        past: the ended attempts, oldest first.
        progress: the progress of the training job; None before its first step.
        upcoming_phases: the progress of a run before its first step; None while its config is unreadable.
        numbers: the latest metrics of the training job.
        has_rollouts: whether the run samples, so that it has rewards; True while its config is unreadable.
        losses: the loss of every step of all attempts; empty with rollouts.
        rewards: the mean reward of every RL step of all attempts.
        accuracies: (step, held-out accuracy) of all attempts.
        max_lag: the staleness limit; None while the config is unreadable.
        events: the attempt's events, by time.
        notices: what happened in the attempt and did not end it, by time.
        failure: the attempt's first failure.
        reason: why the attempt failed or its job stopped, in one line; empty if neither is the case.
        evaluation: the running evaluation, if there is one.
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
    notices: tuple[Notice, ...] = ()

    @property
    def servers(self) -> tuple[RoleLine, ...]:
        """The inference servers, ready or not."""
        return tuple(role for role in self.roles if role.name.startswith("inference."))

    @property
    def ended(self) -> bool:
        """Whether the run has ended: it does not continue by itself."""
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended, even if the run continues."""
        return self.ended or self.state in ("queued", "left")

    @property
    def is_inconclusive(self) -> bool:
        """Whether only the scheduler can show if the run continues."""
        return self.job is not None and (self.state in ("queued", "left") or bool(self.silent))

    @property
    def until(self) -> float:
        """The snapshot's time, or the last role's end if the attempt has ended."""
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
    attached: Sequence[RoleLine] = (),
) -> Snapshot:
    """Compose the snapshot from the run's records. An attempt of an earlier job than `submitted` counts as ended.

    Of `rows` all but the newest training row may be condensed.
    `attached` are the servers of attached jobs, which count only while the attempt is under way.
    """
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
        roles=(*role_lines(newest, silent), *(() if state in ENDED else attached)) if newest else (),
        silent=silent,
        past=tuple(past),
        progress=_progress(rows, training_rows(newest, rows) if state == "training" else [], config),
        upcoming_phases=_ahead(config) if config else None,
        numbers=_numbers(rows),
        has_rollouts=config is None or config.has_rl,
        losses=() if config is None or config.has_rl else _losses(rows),
        rewards=tuple(value for _, value in series(rows, "reward/mean")),
        accuracies=tuple(series(rows, "eval/accuracy")),
        max_lag=config.training.max_lag if config else None,
        events=tuple(sorted(newest.events.values(), key=lambda event: event.time)) if newest else (),
        notices=newest.notices if newest else (),
        failure=newest.failure if newest else None,
        reason=reason_of(newest),
        evaluation=_evaluation(newest, rows) if newest and state not in ENDED else None,
    )


def condense(row: MetricRecord) -> MetricRecord:
    """A row with the values that `compose_snapshot` needs of it, unless it is the newest training row."""
    return {name: row[name] for name in _NEEDED if name in row}


def past_of(attempt: Attempt) -> PastAttempt:
    """The summary of an ended attempt."""
    began, ended = attempt.span or (0.0, 0.0)
    end, why = attempt.end
    return PastAttempt(attempt.name, began, ended - began, end or "cut off", why)


def role_lines(attempt: Attempt, silent: Mapping[int, float]) -> tuple[RoleLine, ...]:
    """The roles of an attempt; `silent` as in `Snapshot`."""
    placements = {other.name: other for other in attempt.world.placements} if attempt.world else {}
    states = attempt.states
    lines = []
    for name in [*placements, *(name for name in states if name not in placements)]:
        placement, last, status = placements.get(name), states.get(name), attempt.statuses.get(name)
        rank = placement.rank if placement else last.rank if last else -1
        # Before it is ready, a role reports what it waits for. The report of a process before a restart is of no use.
        reports = status and last and (last.state == "ready" or last.state == status.state == "starting")
        detail = status.detail if status and reports else last.detail if last else ""
        lines.append(
            RoleLine(
                name=name,
                rank=rank,
                address=placement.address if placement else "",
                state=last.state if last else "waiting",
                since=last.time if last else 0.0,
                detail=detail,
                silent=silent.get(rank, 0.0),
                restarts=attempt.restarts.get(name, ()),
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
        counted = int(
            trained[-1].get("steps") or config.preference.steps or config.training.sft.steps
        )  # the steps of epochs are in the trainer's rows only
        steps = config.training.steps if job == "rl" else counted
    return Progress(job, step, steps, _seconds_left([row for row in mine if row["job"] == job], steps))


def _progress_of_file(last: MetricRecord, mine: list[MetricRecord]) -> Progress:
    """The progress of the job file in the last row. The rows number the steps over all job files."""
    same = [row for row in mine if (row.get("file"), row.get("written")) == (last["file"], last["written"])]
    left = _seconds_left(same, last["step"] - last["done"] + last["of"])
    return Progress(last["job"], last["done"], last["of"], left, last["file"])


def _ahead(config: RunConfig) -> Progress:
    if config.has_preference:
        return Progress("preference", 0, config.preference.steps, None)
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
    """The metrics of the last training row."""
    last = next((row for row in reversed(rows) if row["kind"] == "train"), {})
    return {name: value for name, value in last.items() if isinstance(value, float) and name != "time"}
