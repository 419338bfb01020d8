"""The manifest of a sweep, with its points.

Owns `sweep.json`: the points of a sweep, the names of their runs, and their submitted jobs. Promises that a point never
changes its number and name, and that equal overrides in any order are the same point. Must not know how a run is
submitted.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError, RunStateError
from pipeline.observability.run_history import RUNS, closest_name
from pipeline.run.paths import SWEEP, SweepPaths
from pipeline.utils import shared_files

MAX_NAME = 63
"""Most characters of a run's name; see `pipeline.config.RunConfig.name`."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep.

    Attributes:
        number: its index, from 0.
        overrides: the overrides that only this point has.
        name: the name of its run.
        job: its last submitted job; empty for none.
        submitted: the time of that submission, in seconds since the epoch.
        refused: why its last submission was refused; empty if it was accepted.
    """

    number: int
    overrides: tuple[str, ...]
    name: str
    job: str = ""
    submitted: float = 0.0
    refused: str = ""

    def __str__(self) -> str:
        return f"point {self.number} ({' '.join(self.overrides) or 'no overrides'})"


class SweepManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `sweep.json`: the last command's shared overrides, and all points by number."""

    base: tuple[str, ...]
    points: tuple[Trial, ...] = ()

    def of(self, overrides: Iterable[Sequence[str]]) -> list[Trial]:
        """The points with these overrides, in this order."""
        known = {_key(point.overrides): point for point in self.points}
        return [known[_key(one)] for one in overrides]

    def noted(self, point: Trial) -> "SweepManifest":
        """The manifest with a newer record of one point."""
        points = tuple(point if point.number == old.number else old for old in self.points)
        return msgspec.structs.replace(self, points=points)


def load_manifest(paths: SweepPaths) -> SweepManifest | None:
    """The manifest; None if there is no sweep, `RunStateError` if the file cannot be read."""
    why = "it is torn, or of another version"
    for _ in range(2):  # a file that is replaced during the first read is readable at the second one
        try:
            manifest = shared_files.read_document(paths.manifest, SweepManifest)
            if manifest is None and not paths.manifest.exists():
                return None
        except OSError as error:
            manifest, why = None, error.strerror or str(error)
        if manifest is not None and manifest.points:
            return manifest
        why = "it has no points" if manifest is not None else why
    expected = f"a sweep with a readable {paths.manifest} ({why})"
    hint = f"start a new sweep with name={paths.root.name}-2, or remove {paths.root}"
    raise RunStateError("name", paths.root.name, expected, hint)


def find_sweep(value: str, output: Path | None = None) -> SweepPaths:
    """The sweep with this name below `output`. Without `output`, `value` is a directory, or a name below `runs/`.

    `ConfigError` if there is none.
    """
    below = output or RUNS
    for folder in (below / value,) if output else (Path(value), below / value):
        if value and shared_files.exists(SweepPaths(folder).manifest):
            return SweepPaths(folder.resolve())
    expected = f"a sweep below {below}/" if output else f"a sweep's directory, or a name below {below}/"
    raise ConfigError(
        "sweep", value, expected, closest_name(value, (file.parent.name for file in below.glob(f"*/{SWEEP}")))
    )


def extended(old: SweepManifest | None, base: Sequence[str], overrides: Iterable[Sequence[str]]) -> SweepManifest:
    """The manifest with these points added: known ones stay unchanged, new ones get the next numbers."""
    points = list(old.points) if old else []
    known = {_key(point.overrides) for point in points}
    for one in overrides:
        if _key(one) not in known:
            known.add(_key(one))
            points.append(Trial(number=len(points), overrides=tuple(one), name=run_name(len(points), one)))
    return SweepManifest(base=tuple(base), points=tuple(points))


def run_name(number: int, overrides: Iterable[str]) -> str:
    """A valid run name `<number>-<key>_<value>-…`: the number makes it unique, the rest readable.

    run_name(3, ["optim.lr=0.0001", "loss=gspo"])     3-lr_0.0001-loss_gspo
    """
    pairs = [(key.lstrip("+~"), value) for key, _, value in (text.partition("=") for text in overrides)]
    last = [key.rpartition(".")[2] for key, _ in pairs]
    shown = [key if last.count(short) > 1 else short for (key, _), short in zip(pairs, last, strict=True)]
    words = [re.sub(r"[^A-Za-z0-9._-]+", "_", f"{key}_{value}") for key, (_, value) in zip(shown, pairs, strict=True)]
    return re.sub("__+", "_", "-".join([str(number), *words]))[:MAX_NAME].rstrip("._-")


def _key(overrides: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(overrides))
