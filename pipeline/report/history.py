"""What a run left on disk, read back.

Owns reading a run directory for people: the report and the terminal view show what is found here. Promises never to
fail on what is missing, torn or still being written, and never to write. Must not know how it is shown.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from pipeline import files
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.events import Event, EventName, Events
from pipeline.failure import FirstFailure
from pipeline.frozen import kept_config
from pipeline.metrics import Row, read_rows
from pipeline.paths import AttemptPaths, RunPaths, SweepPaths
from pipeline.plan import World
from pipeline.records import Finished, Outcome, RunIdentity, SubmittedJob
from pipeline.roles.context import Status

RUNS = Path("runs")
"""Where a name is looked up: the default of the config's `output`."""
_SHOWN = 5
"""How many names are listed at most when one is not found."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A role changed state: one line of a rank's timeline, as its agent wrote it."""

    time: float
    role: str
    rank: int
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Attempt:
    """One attempt: what its agents and roles wrote, in the order of time.

    `outcome` is what the scheduler's job became after it, None at the latest while it runs. `alive` has the last sign
    of life (seconds since the epoch) of each rank whose agent has not said that it left.
    """

    paths: AttemptPaths
    transitions: tuple[Transition, ...]
    statuses: dict[str, Status]
    events: dict[str, Event]
    failure: FirstFailure | None
    world: World | None
    outcome: Outcome | None
    alive: dict[int, float]

    @property
    def name(self) -> str:
        return self.paths.attempt

    @property
    def states(self) -> dict[str, Transition]:
        """The last transition of each role."""
        return {transition.role: transition for transition in self.transitions}

    @property
    def is_down(self) -> bool:
        """Whether every role that was started has come down."""
        states = self.states
        return bool(states) and all(last.state in ("stopped", "failed") for last in states.values())

    @property
    def has_failed(self) -> bool:
        """Whether something failed in it, of which not every trace need be readable."""
        return self.failure is not None or "failed" in self.events

    @property
    def end(self) -> tuple[str, str]:
        """How it ended, as a word and one line of why; two empty strings while it runs, or if it left no word."""
        if self.outcome:
            return self.outcome.decision, self.outcome.reason
        if self.failure:
            return "failed", self.failure.one_line()
        told = self.events.get("training_finished") or self.events.get("draining")
        if told is None or not self.is_down:
            return "", ""
        why = f"{told.detail} ({told.by})" if told.detail else told.by
        return "finished" if told.name == "training_finished" else "interrupted", why

    @property
    def span(self) -> tuple[float, float] | None:
        """When its first role was started and when the last change of one was; None before."""
        return (self.transitions[0].time, self.transitions[-1].time) if self.transitions else None


@dataclass(frozen=True)
class History:
    """A whole run; `config`, `identity`, `job` and `finished` are None while they are missing or unreadable.

    `alive` is whether its job runs or may run again; None where that was not asked.
    """

    paths: RunPaths
    config: RunConfig | None
    identity: RunIdentity | None
    job: SubmittedJob | None
    finished: Finished | None
    rows: list[Row]
    attempts: tuple[Attempt, ...]
    alive: bool | None

    @property
    def name(self) -> str:
        return self.paths.root.name


def find_run(arguments: Sequence[str]) -> Path:
    """The directory of the run that a command line names; `ConfigError` if there is none.

    `run=<name or directory>`; a point of a sweep is named `<sweep>/<point>`.
    """
    if len(arguments) != 1:
        raise ConfigError("run", " ".join(arguments), "one name or directory", "run=demo")
    value = arguments[0].removeprefix("run=")
    for folder in (Path(value), RUNS / value):
        if RunPaths(folder).run.exists():
            return folder.resolve()
        if value and SweepPaths(folder).manifest.exists():
            raise ConfigError("run", value, "a run", f"{value} is a sweep: sweep={value}, or run={value}/<point>")
    files_there = [*RUNS.glob("*/run.json"), *RUNS.glob("*/*/run.json")]
    mend = closest(value, (str(file.parent.relative_to(RUNS)) for file in files_there))
    raise ConfigError("run", value, f"a run directory, or a name below {RUNS}/", mend)


def closest(name: str, among: Iterable[str]) -> str:
    """What to say to somebody who named none of these: the few that are most like it."""
    names = sorted(among)
    shown = difflib.get_close_matches(name, names, n=_SHOWN, cutoff=0.0) if len(names) > _SHOWN else names
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"found there: {', '.join(shown) or 'none'}{more}"


def read_history(root: Path, alive: bool | None = None) -> History:
    """Everything that can be read of the run in `root`; `alive` is what the caller knows of its job."""
    run = RunPaths(root)
    identity = files.read_document(run.run, RunIdentity)
    return History(
        paths=run,
        config=kept_config(run),
        identity=identity,
        job=files.read_document(run.job, SubmittedJob),
        finished=files.read_document(run.finished, Finished),
        rows=read_rows(run.metrics),
        attempts=tuple(read_attempt(run.attempt(_id(identity), name)) for name in attempt_names(run)),
        alive=alive,
    )


def attempt_names(run: RunPaths) -> list[str]:
    """The run's attempts, the oldest first."""
    if not run.attempts.is_dir():
        return []
    began = [(_began(folder), folder.name) for folder in run.attempts.iterdir() if folder.is_dir()]
    return [name for _, name in sorted(began)]


def read_attempt(paths: AttemptPaths) -> Attempt:
    """What one attempt wrote so far."""
    told = Events(paths)
    seen = {name: told.seen(name) for name in get_args(EventName)}
    return Attempt(
        paths=paths,
        transitions=tuple(_transitions(paths)),
        statuses=_statuses(paths),
        events={name: event for name, event in seen.items() if event is not None},
        failure=files.read_document(paths.first_failure, FirstFailure),
        world=files.read_document(paths.rendezvous / "world.json", World),
        outcome=files.read_document(paths.outcome, Outcome),
        alive=_signs_of_life(paths),
    )


def _id(identity: RunIdentity | None) -> str:
    return identity.run_id if identity else "unknown"


def _began(attempt: Path) -> float:
    """When an attempt's first role was started, as one of its ranks knows; else when its folder last changed."""
    timelines = sorted(attempt.glob("timeline/rank-*.jsonl"))
    first = next(iter(_lines(timelines[0])), None) if timelines else None
    return first.time if first else attempt.stat().st_mtime


def _transitions(paths: AttemptPaths) -> list[Transition]:
    found = [line for file in sorted(paths.timeline.glob("rank-*.jsonl")) for line in _lines(file)]
    return sorted(found, key=lambda transition: transition.time)


def _lines(timeline: Path) -> list[Transition]:
    """The whole lines of a timeline; one that is being written is left out."""
    found = []
    for line in timeline.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Transition))
        except msgspec.DecodeError:
            continue
    return found


def _signs_of_life(paths: AttemptPaths) -> dict[int, float]:
    """By rank; those that left are no longer expected to give any."""
    try:
        ranks = sorted(int(file.name) for file in paths.alive.iterdir() if file.name.isdecimal())
        return {rank: (paths.alive / str(rank)).stat().st_mtime for rank in ranks if not _left(paths, rank)}
    except FileNotFoundError:
        return {}


def _left(paths: AttemptPaths, rank: int) -> bool:
    return paths.down(f"agent.{rank}").exists()


def _statuses(paths: AttemptPaths) -> dict[str, Status]:
    folder = paths.status("any").parent
    read = {file.stem: files.read_document(file, Status) for file in sorted(folder.glob("[!.]*.json"))}
    return {name: status for name, status in read.items() if status is not None}
