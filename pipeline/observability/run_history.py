"""Reading a run directory for the report and the terminal view.

Missing, damaged or incomplete files never raise, and nothing is written.
"""

import difflib
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError
from pipeline.roles.role_context import Status
from pipeline.roles.world_revisions import WorldRevisions
from pipeline.run.events import Event, Events
from pipeline.run.fault_plan import FAULT
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import MetricRecord, read_rows
from pipeline.run.notices import Notice, read_notices
from pipeline.run.paths import RUN, AttemptPaths, RunPaths, SweepPaths
from pipeline.run.run_documents import Finished, Outcome, RunIdentity, SubmittedJob
from pipeline.run.transitions import Transition, read_timeline, timeline_ranks
from pipeline.topology.plan import World
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir

RUNS = Path("runs")
"""The folder in which run names are looked up: the default of the config's `output`."""
_SHOWN = 5
"""Maximum number of names that an error lists."""
_ATTEMPT = re.compile(r"[!-,/-~][!-~]*-[!-~]+")
"""Names of attempts. Other folders, such as those that NFS leaves of open files (`.nfs…`), are none."""
PER_LOOK = 32
"""Known files of single ranks that one `AttemptReader.read` reads again. The demo run has fewer."""


@dataclass(frozen=True)
class Attempt:
    """The records of one attempt's agents and roles, in order of time.

    `outcome` is the decision about the scheduler's job after the attempt, None before that. `alive` has the last
    heartbeat (seconds since the epoch) of each rank whose agent has not reported its exit.
    """

    paths: AttemptPaths
    transitions: tuple[Transition, ...]
    statuses: dict[str, Status]
    events: dict[str, Event]
    failure: FirstFailure | None
    world: World | None
    outcome: Outcome | None
    alive: dict[int, float]
    notices: tuple[Notice, ...] = ()

    @property
    def name(self) -> str:
        return self.paths.attempt

    @property
    def states(self) -> dict[str, Transition]:
        """The last transition of each role."""
        return {transition.role: transition for transition in self.transitions if transition.state != FAULT}

    @property
    def restarts(self) -> dict[str, tuple[str, ...]]:
        """The reasons of the restarts in place of each role that had some, the oldest first."""
        reasons: dict[str, tuple[str, ...]] = {}
        for transition in self.transitions:
            if transition.state == "restarting":
                reasons[transition.role] = (*reasons.get(transition.role, ()), transition.detail)
        return reasons

    @property
    def is_down(self) -> bool:
        """Whether every started role has stopped or failed."""
        states = self.states
        return bool(states) and all(last.state in ("stopped", "failed") for last in states.values())

    @property
    def has_failed(self) -> bool:
        """Whether a role failed. The record of the first failure may be missing or unreadable then."""
        return self.failure is not None or "failed" in self.events

    @property
    def end(self) -> tuple[str, str]:
        """The end of the attempt, as a word and a reason in one line. Both are empty without a record of an end."""
        if self.outcome:
            return self.outcome.decision, self.outcome.reason
        if self.failure:
            return "failed", self.failure.one_line()
        event = self.events.get("training_finished") or self.events.get("draining")
        if event is None or not self.is_down:
            return "", ""
        # The event of a finished run names the role that published it, which is no reason.
        return ("finished", "") if event.name == "training_finished" else ("interrupted", event.why)

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of the first and the last transition of a role; None before the first."""
        return (self.transitions[0].time, self.transitions[-1].time) if self.transitions else None


@dataclass(frozen=True)
class History:
    """A whole run. `config`, `identity`, `job` and `finished` are None while they are missing or unreadable.

    `alive` is whether the job runs or may run again; None if it was not queried.
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

    The argument is `run=<name or directory>`. The name of a sweep's trial is `<sweep>/<point>`.
    """
    if len(arguments) != 1:
        raise ConfigError("run", " ".join(arguments), "one name or directory", "run=demo")
    value = arguments[0].removeprefix("run=")
    for folder in (Path(value), RUNS / value):
        try:
            is_run, is_sweep = map(shared_files.exists, (RunPaths(folder).run, SweepPaths(folder).manifest))
        except PermissionError:
            hint = "its owner may open it to the group (cluster.readable_by=group)"
            raise ConfigError("run", value, "a run directory that you may read", hint) from None
        if is_run:
            return folder.resolve()
        if value and is_sweep:
            raise ConfigError("run", value, "a run", f"{value} is a sweep: sweep={value}, or run={value}/<point>")
    files_there = [*RUNS.glob(f"*/{RUN}"), *RUNS.glob(f"*/*/{RUN}")]
    hint = closest_name(value, (str(file.parent.relative_to(RUNS)) for file in files_there))
    raise ConfigError("run", value, f"a run directory, or a name below {RUNS}/", hint)


def closest_name(name: str, candidates: Iterable[str]) -> str:
    """The hint for an unknown name: all candidates if they are few, else the most similar ones."""
    names = sorted(candidates)
    shown = difflib.get_close_matches(name, names, n=_SHOWN, cutoff=0.0) if len(names) > _SHOWN else names
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"found there: {', '.join(shown) or 'none'}{more}"


def read_history(root: Path, alive: bool | None = None) -> History:
    """All readable records of the run in `root`. `alive` is passed on: whether its job runs, if the caller knows."""
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
    """The run's attempts, the oldest first. `known` caches their start times for repeated calls."""
    known = {} if known is None else known
    try:
        with os.scandir(run.attempts) as entries:
            names = [entry.name for entry in entries if _ATTEMPT.fullmatch(entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for _, name in sorted((_began(AttemptPaths(run.root, "", name), known), name) for name in names)]


class AttemptReader:
    """Reads a running attempt repeatedly, at a cost that hardly grows with the number of ranks.

    Every `read` lists every folder, reads all new files of single ranks, and reads `PER_LOOK` of the known ones again,
    in rotation. So the data of a rank is at most `ranks / PER_LOOK` calls old.
    """

    def __init__(self, paths: AttemptPaths) -> None:
        self._paths, self._events = paths, Events(paths)
        self._worlds = WorldRevisions(paths)
        self._world: World | None = None
        self._transitions: dict[int, list[Transition]] = {}
        self._signs: dict[int, float] = {}
        self._turns: deque[tuple[str, int]] = deque()

    def read(self) -> Attempt:
        """The records that the attempt has written so far."""
        paths = self._paths
        marks = _names(paths.marks)
        # An agent that has left its mark of exit has ended in order: its old heartbeat is no sign of a hang.
        living = {rank for rank in _ranks(_names(paths.alive)) if paths.down(f"agent.{rank}").name not in marks}
        timelines = timeline_ranks(paths)
        self._look([*(("alive", rank) for rank in living), *(("timeline", rank) for rank in timelines)])
        with suppress(OSError):
            self._world = self._worlds.newest()
        lines = [line for rank in sorted(self._transitions) for line in self._transitions[rank]]
        return Attempt(
            paths=paths,
            transitions=tuple(sorted(lines, key=lambda transition: transition.time)),
            statuses=_statuses(paths),
            events={str(name): event for name, event in self._events.read_all().items()},
            failure=shared_files.read_document(paths.first_failure, FirstFailure),
            world=self._world,
            outcome=shared_files.read_document(paths.outcome, Outcome),
            notices=read_notices(paths),
            alive={rank: self._signs[rank] for rank in sorted(living) if rank in self._signs},
        )

    def _look(self, files: Sequence[tuple[str, int]]) -> None:
        """Read the new ones of `files`, and the next `PER_LOOK` known files."""
        known = set(self._turns)
        new = [file for file in files if file not in known]
        # Rotate the queue of known files: each call reads the next ones.
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
                self._transitions[rank] = read_timeline(self._paths.timeline_of(rank))


def read_attempt(paths: AttemptPaths) -> Attempt:
    """The records that one attempt has written so far."""
    return AttemptReader(paths).read()


def _id(identity: RunIdentity | None) -> str:
    return identity.run_id if identity else "unknown"


def _began(paths: AttemptPaths, known: dict[str, float]) -> float:
    """The time of the first transition in one rank's timeline, else the folder's last change."""
    if paths.attempt not in known:
        ranks = timeline_ranks(paths)
        first = next(iter(read_timeline(paths.timeline_of(ranks[0]))), None) if ranks else None
        if first is None:  # not cached: the first transition may appear later
            return paths.root.stat().st_mtime
        known[paths.attempt] = first.time
    return known[paths.attempt]


def _names(folder: Path) -> frozenset[str]:
    return frozenset(FileSharedDir(folder).names())


def _ranks(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _statuses(paths: AttemptPaths) -> dict[str, Status]:
    names = sorted(name for name in _names(paths.statuses) if name.endswith(".json") and not name.startswith("."))
    read = {name.removesuffix(".json"): shared_files.read_document(paths.statuses / name, Status) for name in names}
    return {name: status for name, status in read.items() if status is not None}
