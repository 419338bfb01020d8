"""The points of a sweep before anything is submitted: what each would be, and where it stands.

Owns the look at a sweep: every point composed, compared with what is there, checked; and the claim on its directory.
Promises that a look writes nothing, that one wrong point is an error which names it, and that a point's run never
changes its config. Must not know how a run is submitted.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.progress import track

from pipeline.config import ClusterConfig, RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.run_identity import differences
from pipeline.errors import ConfigError, RunStateError
from pipeline.run.completion import is_finished
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.topology.plan import Plan
from pipeline.utils import shared_files
from pipeline.utils.private_files import make_directory
from pipeline.utils.terminal import console
from slurm.registry import file_locks, run_registry
from slurm.registry import sweep_manifest as manifest
from slurm.registry.run_contents import located_config
from slurm.registry.sweep_manifest import SweepManifest, Trial
from slurm.scheduler.scheduler_protocol import Scheduler
from slurm.submission.compose_config import Expansion, compose_config

Check = Callable[[RunConfig], Plan]
"""The plan of a config that can be submitted, or an error."""
FindScheduler = Callable[[], Scheduler]
"""The scheduler, or an error when there is none; called when the first job of one is met."""
TrialStatus = Literal["open", "finished", "live"]

_MANY = 20
"""From so many points on, looking at them is worth a progress bar."""


@dataclass(frozen=True)
class PlannedTrial:
    """A point of this command: its config, and where it stands; `plan` is None unless it is open."""

    point: Trial
    config: RunConfig
    standing: TrialStatus
    plan: Plan | None = None


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep that was looked at and found right; nothing is written yet.

    Attributes:
        found: the manifest that was there; `manifest` is what it becomes.
        entries: the points of this command, in its order.
    """

    paths: SweepPaths
    found: SweepManifest | None
    manifest: SweepManifest
    entries: tuple[PlannedTrial, ...]

    @property
    def local(self) -> bool:
        return self.entries[0].config.cluster.kind == "local"

    @property
    def open(self) -> list[tuple[PlannedTrial, Plan]]:
        return [(entry, entry.plan) for entry in self.entries if entry.plan is not None]


def prepare_sweep(expansion: Expansion, check: Check, scheduler: FindScheduler) -> PreparedSweep:
    """Every point composed, compared with what is there, and checked; the error names the point."""
    quiet = len(expansion.points) < _MANY or not sys.stdout.isatty()
    configs = []
    for overrides in track(expansion.points, "composing", console=console(), transient=True, disable=quiet):
        with named_point(overrides):
            configs.append(compose_config([*expansion.base, *overrides]))
    _refuse_unlike(configs)
    _refuse_equal(expansion.points, configs)
    paths = SweepPaths(directory_of(configs))
    refuse_run_directory(paths)
    found = manifest.load_manifest(paths)
    kept = manifest.extended(found, expansion.base, expansion.points)
    entries = []
    pairs = list(zip(kept.of(expansion.points), configs, strict=True))
    for point, config in track(pairs, "checking", console=console(), transient=True, disable=quiet):
        mine = config.model_copy(update={"name": point.name, "output": paths.root})
        with named_point(point.overrides):
            entries.append(_entry(point, mine, check, scheduler))
    return PreparedSweep(paths, found, kept, tuple(entries))


@contextmanager
def claimed_sweep(prepared: PreparedSweep) -> Iterator[None]:
    """Hold the sweep's directory while it submits, with the manifest written; `RunStateError` if another does."""
    paths = prepared.paths
    with claimed_directory(paths, prepared.entries[0].config.cluster):
        if manifest.load_manifest(paths) != prepared.found:
            raise _submitted_elsewhere(paths, "it was submitted elsewhere since this command looked at it")
        shared_files.write_document(paths.manifest, prepared.manifest)
        yield


@contextmanager
def claimed_directory(paths: SweepPaths, cluster: ClusterConfig) -> Iterator[None]:
    """Hold the directory of a sweep, made or found; `RunStateError` if another process does."""
    try:
        make_directory(paths.root, cluster.directory_mode)
        lock = file_locks.open_lock(paths.lock)
    except OSError as error:
        expected = "a directory this user can write"
        raise ConfigError("output", str(paths.root.parent), expected, error.strerror or str(error)) from None
    with lock:
        if not file_locks.take_lock(lock.fileno(), paths.lock):
            raise _submitted_elsewhere(paths, file_locks.signature(paths.lock))
        yield


@contextmanager
def named_point(overrides: Sequence[str]) -> Iterator[None]:
    """An error in a point says in which."""
    try:
        yield
    except ConfigError as error:
        if overrides:
            key = f"point {' '.join(overrides)}: {error.key}"
            raise type(error)(key, error.value, error.expected, error.hint) from None
        raise


def directory_of(configs: Sequence[RunConfig]) -> Path:
    """`<output>/<name>`, which all points must agree on."""
    folders = {config.directory.resolve(): None for config in configs}
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise ConfigError("name", names, "one name for the sweep", "set name=…")
    return next(iter(folders))


def refuse_run_directory(paths: SweepPaths) -> None:
    """Raise `RunStateError` when the directory is a run's."""
    name = paths.root.name
    if RunPaths(paths.root).run.exists():
        raise RunStateError("name", name, "a name that is no run's", f"name the sweep otherwise (name={name}-sweep)")


def _submitted_elsewhere(paths: SweepPaths, who: str) -> RunStateError:
    expected = f"a sweep that nobody else is submitting ({who})"
    return RunStateError("name", paths.root.name, expected, "wait for it, then submit again")


def _refuse_unlike(configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` unless all points run at the same kind of place: a sweep is submitted in one way."""
    kinds = {config.cluster.kind: None for config in configs}
    if len(kinds) > 1:
        raise ConfigError("cluster.kind", ", ".join(kinds), "one kind for the sweep", "submit a sweep for each")


def _refuse_equal(points: Sequence[tuple[str, ...]], configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` when two points are one run, however their overrides are written."""
    seen: dict[str, tuple[str, ...]] = {}
    for overrides, config in zip(points, configs, strict=True):
        earlier = seen.setdefault(config.model_dump_json(), overrides)
        if earlier is not overrides:
            told = f"{' '.join(earlier)} and {' '.join(overrides)}"
            raise ConfigError("sweep", told, "points that differ", "these two are the same run: leave out one")


def _entry(point: Trial, config: RunConfig, check: Check, scheduler: FindScheduler) -> PlannedTrial:
    run = RunPaths(config.directory)
    old = read_frozen_config(run)
    changes = differences(old, located_config(config)) if old else []
    if changes:
        hint = "submit the sweep as it was, or give it another name"
        raise RunStateError("name", point.name, f"the config this point was made with, but {'; '.join(changes)}", hint)
    if is_finished(run):
        return PlannedTrial(point, config, "finished")
    if _is_live(run, config, scheduler):
        return PlannedTrial(point, config, "live")
    return PlannedTrial(point, config, "open", check(config))


def _is_live(run: RunPaths, config: RunConfig, scheduler: FindScheduler) -> bool:
    if run_registry.is_live_here(run):
        return True
    job = run_registry.submitted_job(run)
    scheduled = job is not None and job.kind == "slurm"
    if not scheduled and (config.cluster.kind != "slurm" or not run.run.exists()):
        return False
    return run_registry.live_job(run, scheduler()) is not None
