"""The trials ("points") of a sweep before submission: their configs, plans and states.

Owns the preparation of a sweep, which composes every point, compares it with an existing run and checks it; and the
lock of the sweep's directory. Promises that preparation writes nothing, that an invalid point is an error with the
point's overrides, and that a point's run never changes its config. Must not know how a run is submitted.
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
from slurm.scheduler.scheduler_protocol import Connect
from slurm.submission.compose_config import ConfigComposer, Expansion

Check = Callable[[RunConfig], Plan]
"""Returns the plan of a config that can be submitted; raises otherwise."""
TrialStatus = Literal["open", "finished", "live"]

_MANY = 20
"""Points from which preparation shows a progress bar."""


@dataclass(frozen=True)
class PlannedTrial:
    """A point of this command with its config and state; `plan` is None unless the state is open."""

    point: Trial
    config: RunConfig
    standing: TrialStatus
    plan: Plan | None = None


@dataclass(frozen=True)
class PreparedSweep:
    """A valid sweep; nothing is written yet.

    Attributes:
        existing: the manifest on disk, if any.
        manifest: the manifest after this command.
        entries: the points of this command, in its order.
    """

    paths: SweepPaths
    existing: SweepManifest | None
    manifest: SweepManifest
    entries: tuple[PlannedTrial, ...]

    @property
    def local(self) -> bool:
        return self.entries[0].config.cluster.on_this_machine

    @property
    def open(self) -> list[tuple[PlannedTrial, Plan]]:
        return [(entry, entry.plan) for entry in self.entries if entry.plan is not None]


def prepare_sweep(expansion: Expansion, check: Check, connect: Connect) -> PreparedSweep:
    """Compose and check every point, and compare it with an existing run. An error names the point."""
    quiet = len(expansion.points) < _MANY or not sys.stdout.isatty()
    configs, composer = [], ConfigComposer()
    for overrides in track(expansion.points, "composing", console=console(), transient=True, disable=quiet):
        with named_point(overrides):
            configs.append(composer.compose([*expansion.base, *overrides]))
    _refuse_unlike(configs)
    _refuse_equal(expansion.points, configs)
    paths = SweepPaths(directory_of(configs))
    refuse_run_directory(paths)
    existing = manifest.load_manifest(paths)
    extended = manifest.extended(existing, expansion.base, expansion.points)
    entries = []
    pairs = list(zip(extended.of(expansion.points), configs, strict=True))
    for point, config in track(pairs, "checking", console=console(), transient=True, disable=quiet):
        located = config.model_copy(update={"name": point.name, "output": paths.root})
        with named_point(point.overrides):
            entries.append(_entry(point, located, check, connect))
    return PreparedSweep(paths, existing, extended, tuple(entries))


@contextmanager
def claimed_sweep(prepared: PreparedSweep) -> Iterator[None]:
    """Lock the sweep's directory for a submission and write the manifest; `RunStateError` if it is locked."""
    paths = prepared.paths
    with claimed_directory(paths, prepared.entries[0].config.cluster):
        if manifest.load_manifest(paths) != prepared.existing:
            raise _submitted_elsewhere(paths, "it was submitted elsewhere since this command read it")
        shared_files.write_document(paths.manifest, prepared.manifest)
        yield


@contextmanager
def claimed_directory(paths: SweepPaths, cluster: ClusterConfig) -> Iterator[None]:
    """Lock a sweep's directory, which is created if absent; `RunStateError` if another process holds it."""
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
    """Add the point's overrides to a `ConfigError` of the block."""
    try:
        yield
    except ConfigError as error:
        if overrides:
            key = f"point {' '.join(overrides)}: {error.key}"
            raise type(error)(key, error.value, error.expected, error.hint) from None
        raise


def directory_of(configs: Sequence[RunConfig]) -> Path:
    """The directory `<output>/<name>`; `ConfigError` unless it is the same for all points."""
    folders = {config.directory.resolve(): None for config in configs}
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise ConfigError("name", names, "one name for the sweep", "set name=…")
    return next(iter(folders))


def refuse_run_directory(paths: SweepPaths) -> None:
    """Raise `RunStateError` when the directory is a run's."""
    name = paths.root.name
    if RunPaths(paths.root).run.exists():
        raise RunStateError("name", name, "a name that no run has", f"give the sweep another name (name={name}-sweep)")


def _submitted_elsewhere(paths: SweepPaths, who: str) -> RunStateError:
    expected = f"a sweep that no other process is submitting ({who})"
    return RunStateError("name", paths.root.name, expected, "wait for it, then submit again")


def _refuse_unlike(configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` unless all points have one `cluster.scheduler`: a sweep is submitted in one way."""
    kinds = {config.cluster.scheduler: None for config in configs}
    if len(kinds) > 1:
        raise ConfigError(
            "cluster.scheduler", ", ".join(kinds), "one scheduler for all points", "submit a sweep for each"
        )


def _refuse_equal(points: Sequence[tuple[str, ...]], configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` if two points have equal configs, even if their overrides are spelled differently."""
    seen: dict[str, tuple[str, ...]] = {}
    for overrides, config in zip(points, configs, strict=True):
        earlier = seen.setdefault(config.model_dump_json(), overrides)
        if earlier is not overrides:
            pair = f"{' '.join(earlier)} and {' '.join(overrides)}"
            raise ConfigError("sweep", pair, "points that differ", "these two are the same run: leave out one")


def _entry(point: Trial, config: RunConfig, check: Check, connect: Connect) -> PlannedTrial:
    run = RunPaths(config.directory)
    old = read_frozen_config(run)
    changes = differences(old, located_config(config)) if old else []
    if changes:
        hint = "submit the sweep as it was, or give it another name"
        raise RunStateError("name", point.name, f"the config this point was made with, but {'; '.join(changes)}", hint)
    if is_finished(run):
        return PlannedTrial(point, config, "finished")
    if _is_live(run, config, connect):
        return PlannedTrial(point, config, "live")
    return PlannedTrial(point, config, "open", check(config))


def _is_live(run: RunPaths, config: RunConfig, connect: Connect) -> bool:
    if run_registry.is_live_here(run):
        return True
    name = run_registry.queue_of(run, config)
    return bool(name) and run_registry.live_job(run, connect(name)) is not None
