"""What a run left on disk, read back.

Owns reading a run directory for people: the report and the terminal view show what is found here. Promises never to
fail on what is missing, torn or still being written, and never to write. Must not know how it is shown.
"""

import difflib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError
from pipeline.roles.role_context import Status
from pipeline.run.events import Event, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import MetricRecord, read_rows
from pipeline.run.paths import RUN, AttemptPaths, RunPaths, SweepPaths, rank_of_timeline
from pipeline.run.run_documents import Finished, Outcome, RunIdentity, SubmittedJob
from pipeline.topology.plan import World
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir

RUNS = Path("runs")
"""Where a name is looked up: the default of the config's `output`."""
_SHOWN = 5
"""How many names are listed at most when one is not found."""
PER_LOOK = 32
"""How many files of single ranks are read again at one look; the demo has fewer."""


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
        return "finished" if told.name == "training_finished" else "interrupted", told.why

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
    rows: list[MetricRecord]
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
        try:
            is_run, is_sweep = RunPaths(folder).run.exists(), SweepPaths(folder).manifest.exists()
        except PermissionError:
            hint = "its owner may open it to his group (cluster.readable_by=group)"
            raise ConfigError("run", value, "a run directory that you may read", hint) from None
        if is_run:
            return folder.resolve()
        if value and is_sweep:
            raise ConfigError("run", value, "a run", f"{value} is a sweep: sweep={value}, or run={value}/<point>")
    files_there = [*RUNS.glob(f"*/{RUN}"), *RUNS.glob(f"*/*/{RUN}")]
    hint = closest_name(value, (str(file.parent.relative_to(RUNS)) for file in files_there))
    raise ConfigError("run", value, f"a run directory, or a name below {RUNS}/", hint)


def closest_name(name: str, among: Iterable[str]) -> str:
    """What to say to somebody who named none of these: the few that are most like it."""
    names = sorted(among)
    shown = difflib.get_close_matches(name, names, n=_SHOWN, cutoff=0.0) if len(names) > _SHOWN else names
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"found there: {', '.join(shown) or 'none'}{more}"


def read_history(root: Path, alive: bool | None = None) -> History:
    """Everything that can be read of the run in `root`; `alive` is what the caller knows of its job."""
    run = RunPaths(root)
    identity = shared_files.read_document(run.run, RunIdentity)
    return History(
        paths=run,
        config=read_frozen_config(run),
        identity=identity,
        job=shared_files.read_document(run.job, SubmittedJob),
        finished=shared_files.read_document(run.finished, Finished),
        rows=read_rows(run.metrics),
        attempts=tuple(read_attempt(run.attempt(_id(identity), name)) for name in attempt_names(run)),
        alive=alive,
    )


def attempt_names(run: RunPaths, known: dict[str, float] | None = None) -> list[str]:
    """The run's attempts, the oldest first. `known` is when each began, for a caller who asks again and again."""
    known = {} if known is None else known
    try:
        with os.scandir(run.attempts) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for _, name in sorted((_began(AttemptPaths(run.root, "", name), known), name) for name in names)]


class AttemptReader:
    """Reads an attempt, and again as it goes on.

    Every folder is listed at every look. Of the files that each rank has, those that are new are read, and of the
    others so many as `PER_LOOK`, in turns: so what a look costs hardly grows with the ranks, and what it tells of a
    single rank is at most `ranks / PER_LOOK` looks old.
    """

    def __init__(self, paths: AttemptPaths) -> None:
        self._paths, self._events = paths, Events(paths)
        self._world: World | None = None
        self._transitions: dict[int, list[Transition]] = {}
        self._signs: dict[int, float] = {}
        self._turns: deque[tuple[str, int]] = deque()

    def read(self) -> Attempt:
        """What the attempt wrote so far."""
        paths = self._paths
        marks = _names(paths.marks)
        living = {rank for rank in _ranks(_names(paths.alive)) if paths.down(f"agent.{rank}").name not in marks}
        timelines = _timelines(paths)
        self._look([*(("alive", rank) for rank in living), *(("timeline", rank) for rank in timelines)])
        self._world = self._world or shared_files.read_document(paths.world, World)
        lines = [line for rank in sorted(self._transitions) for line in self._transitions[rank]]
        return Attempt(
            paths=paths,
            transitions=tuple(sorted(lines, key=lambda transition: transition.time)),
            statuses=_statuses(paths),
            events={str(name): event for name, event in self._events.read_all().items()},
            failure=shared_files.read_document(paths.first_failure, FirstFailure),
            world=self._world,
            outcome=shared_files.read_document(paths.outcome, Outcome),
            alive={rank: self._signs[rank] for rank in sorted(living) if rank in self._signs},
        )

    def _look(self, there: Sequence[tuple[str, int]]) -> None:
        """Read what is there and new, and some of the rest."""
        known = set(self._turns)
        new = [file for file in there if file not in known]
        for _ in range(min(PER_LOOK, len(self._turns))):
            file = self._turns.popleft()
            self._turns.append(file)
            self._read(*file)
        for file in new:
            self._turns.append(file)
            self._read(*file)

    def _read(self, kind: str, rank: int) -> None:
        with suppress(FileNotFoundError):
            if kind == "alive":
                self._signs[rank] = os.stat(self._paths.sign_of_life(rank)).st_mtime
            else:
                self._transitions[rank] = _lines(self._paths.timeline_of(rank))


def read_attempt(paths: AttemptPaths) -> Attempt:
    """What one attempt wrote so far."""
    return AttemptReader(paths).read()


def _id(identity: RunIdentity | None) -> str:
    return identity.run_id if identity else "unknown"


def _began(paths: AttemptPaths, known: dict[str, float]) -> float:
    """When an attempt's first role was started, as one of its ranks knows; else when its folder last changed."""
    if paths.attempt not in known:
        ranks = _timelines(paths)
        first = next(iter(_lines(paths.timeline_of(ranks[0]))), None) if ranks else None
        if first is None:
            return paths.root.stat().st_mtime
        known[paths.attempt] = first.time
    return known[paths.attempt]


def _timelines(paths: AttemptPaths) -> list[int]:
    """The ranks that have one."""
    return sorted(rank for name in _names(paths.timeline) if (rank := rank_of_timeline(name)) is not None)


def _lines(timeline: Path) -> list[Transition]:
    """The whole lines of a timeline; one that is being written is left out."""
    found = []
    for line in timeline.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Transition))
        except msgspec.DecodeError:
            continue
    return found


def _names(folder: Path) -> frozenset[str]:
    return frozenset(FileSharedDir(folder).names())


def _ranks(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _statuses(paths: AttemptPaths) -> dict[str, Status]:
    names = sorted(name for name in _names(paths.statuses) if name.endswith(".json") and not name.startswith("."))
    read = {name.removesuffix(".json"): shared_files.read_document(paths.statuses / name, Status) for name in names}
    return {name: status for name, status in read.items() if status is not None}
