"""Hydra's part of a command line, and the keys of our Hydra launcher.

Owns the split of a sweeper's command, and the keys of `hydra/launcher=rollcall`. Promises a `ConfigError` before
anything starts for a sweeper that is not installed, for another launcher, and for a key that nothing reads.

    python launchers/submit.py -m hydra/sweeper=optuna hydra.sweeper.n_trials=6 optim.lr=interval(1e-5,1e-3)
                                  └─────────────── Hydra's ───────────────────┘ └───────── an axis ──────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pipeline.config import closest_match
from pipeline.errors import ConfigError
from pipeline.utils.optional_extras import pip_install
from slurm.submission.compose_config import split_axes
from slurm.submission.sweeps.sweep_metric import Job, SweepMetric

LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"
OURS = ("objective", "window", "job")
"""The keys below `hydra.launcher` that are read."""
EXTRAS = {"optuna": "optuna"}
"""The extra of this package that installs a sweeper."""
_DIRECTORIES = ("hydra.sweep.dir", "hydra.sweep.subdir", "hydra.run.dir", "hydra.output_subdir")
_AXES = ("hydra.sweeper.params", "hydra.sweeper.search_space")
_UNSET = ("_target_", "name", "submitit_folder")


@dataclass(frozen=True)
class SweeperCommand:
    """A sweeper's command, split into its three kinds of override.

    Attributes:
        hydra: Hydra's own overrides, including our launcher.
        fixed: the overrides that all points share, as the user wrote them.
        axes: the overrides whose values the sweeper chooses.
    """

    hydra: tuple[str, ...]
    fixed: tuple[str, ...]
    axes: tuple[str, ...]

    def is_set(self, key: str) -> bool:
        """Whether one of Hydra's keys is set on the command line."""
        return any(_key(text) == key for text in self.hydra)


def names_hydra(overrides: Sequence[str]) -> str:
    """The first override of Hydra's own configuration; empty if there is none."""
    return next((text for text in overrides if _is_hydras(text)), "")


def read_sweeper_command(overrides: Sequence[str]) -> SweeperCommand:
    """Split a sweeper's command; `ConfigError` for an override that a sweeper cannot have."""
    hydra = [text for text in overrides if _is_hydras(text)]
    fixed, axes = split_axes([text for text in overrides if not _is_hydras(text)])
    settings = SweeperCommand(tuple(hydra), fixed, axes)
    if not settings.is_set(SWEEPER):
        raise ConfigError(SWEEPER, None, "a sweeper for Hydra's keys", "add hydra/sweeper=optuna, or leave them out")
    for text in hydra:
        key, value = _key(text), text.partition("=")[2]
        if key == LAUNCHER and value != "rollcall":
            raise ConfigError(LAUNCHER, value, "rollcall, which starts runs", "leave it out")
        if key in _DIRECTORIES:
            raise ConfigError(key, value, "no directory: name=… and output=… set the sweep's directory", "leave it out")
        if key.startswith(_AXES):  # Hydra cannot merge these on a command line; in a file they are read
            hint = "sweep over the keys themselves: 'optim.lr=interval(1e-5,1e-3)'"
            raise ConfigError(key, value, "no search space on the command line", hint)
    if not settings.is_set(LAUNCHER):
        settings = SweeperCommand((f"{LAUNCHER}=rollcall", *hydra), fixed, axes)
    return settings


def refuse_missing(settings: SweeperCommand, installed: Sequence[str]) -> None:
    """Raise `ConfigError`, with the command that installs it, for a sweeper that is not in `installed`."""
    for text in settings.hydra:
        value = text.partition("=")[2]
        if _key(text) == SWEEPER and value not in installed:
            expected = f"an installed sweeper ({', '.join(sorted(installed))})"
            hint = closest_match(value, list(installed))
            if value in EXTRAS:
                hint = pip_install(EXTRAS[value])
            raise ConfigError(SWEEPER, value, expected, hint)


def read_objective(launcher: dict[str, Any], unset: dict[str, Any]) -> SweepMetric:
    """The objective in the launcher's part of Hydra's config; `unset` is that part with its defaults."""
    for key, value in launcher.items():
        if key not in (*OURS, *_UNSET) and value != unset.get(key):
            hint = "resources.* and cluster.* set the resources of a run"
            raise ConfigError(f"hydra.launcher.{key}", value, f"one of {', '.join(OURS)}", hint)
    named, window, job = (launcher[key] for key in OURS)
    names = tuple(named) if isinstance(named, list) else (named,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError("hydra.launcher.objective", named, "a metric of docs/metrics.md, or a list of them")
    if not isinstance(window, int) or window < 1:
        raise ConfigError("hydra.launcher.window", window, "how many of the last values count: 1 or more")
    if job not in get_args(Job):
        raise ConfigError("hydra.launcher.job", job, f"one of {', '.join(get_args(Job))}")
    return SweepMetric(names, window, job)


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _is_hydras(text: str) -> bool:
    return _key(text).startswith(("hydra/", "hydra."))
