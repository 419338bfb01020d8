"""The storage of an Optuna study, and its resumption.

Owns Optuna's storage before the sweeper opens it. Promises that the same command completes a study. Trials without a
value, since they failed or their command ended, are queued again with the same parameters, so they resume the same
runs; new trials run only until the study has `n_trials`. Imports Optuna only for a command that names its sweeper.

Without this module the sweeper loses a study that has no storage, leaves the trials of a killed command in the state
RUNNING, and runs `n_trials` more trials with each command.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, one_line

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

SWEEPER = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
FILE = "study.db"


@dataclass(frozen=True)
class StudyLocation:
    """The storage URL and the name of a study. Default: a file in the sweep's directory, named after the sweep."""

    storage: str | None
    name: str


def is_optuna(sweeper: Mapping[str, Any]) -> bool:
    """Whether this part of Hydra's config is Optuna's sweeper."""
    return sweeper.get("_target_") == SWEEPER


def directions_of(sweeper: Mapping[str, Any], is_set: Callable[[str], bool]) -> list[str]:
    """`maximize` or `minimize` for each objective; `ConfigError` unless the command sets the direction.

    Optuna's own default is to minimize, which is wrong for every reward.
    """
    value = sweeper["direction"]
    if not is_set("hydra.sweeper.direction"):
        hint = "add hydra.sweeper.direction=maximize, or minimize"
        raise ConfigError("hydra.sweeper.direction", None, "maximize or minimize", hint)
    directions = [getattr(one, "name", str(one)) for one in (value if isinstance(value, list) else [value])]
    if wrong := [one for one in directions if one not in ("maximize", "minimize")]:
        raise ConfigError("hydra.sweeper.direction", wrong[0], "maximize or minimize, for each objective")
    return directions


def refuse_grid(sweeper: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the grid sampler, which ignores the values of trials."""
    if str(sweeper["sampler"].get("_target_")).endswith(".GridSampler"):
        hint = "plain -m runs every combination: leave Hydra's keys out"
        raise ConfigError("hydra/sweeper/sampler", "grid", "a sampler that uses the results of trials", hint)


def existing_study(sweeper: Mapping[str, Any], is_set: Callable[[str], bool], directory: Path) -> StudyLocation:
    """The study's storage and name, with defaults for settings that the command does not have."""
    storage = sweeper["storage"]
    if storage is None and not is_set("hydra.sweeper.storage"):
        storage = f"sqlite:///{directory / FILE}"
    return StudyLocation(storage, sweeper["study_name"] or directory.name)


def resume_study(location: StudyLocation, sweeper: Mapping[str, Any], directions: list[str]) -> dict[str, Any]:
    """Queue unfinished trials again. Returns the changed settings of the sweeper: keys below `hydra.sweeper`.

    `ConfigError` for a storage that cannot be opened, or a study that has other directions.
    """
    sampler = sweeper["sampler"]
    changed: dict[str, Any] = {"storage": location.storage, "study_name": location.name}
    if location.storage is None:
        return changed
    known, completed = _requeue_trials(location, directions)
    changed["n_trials"] = max(0, sweeper["n_trials"] - completed)
    if known and sampler.get("seed") is not None:  # the same seed would draw the same points again
        changed["sampler.seed"] = sampler["seed"] + known
    return changed


def _requeue_trials(location: StudyLocation, directions: list[str]) -> tuple[int, int]:
    """Queue trials without a value again. Returns the number of trials, and the number of those with a value."""
    import optuna
    from optuna.trial import TrialState

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = _load_study(location, directions)
        if study is None:
            return 0, 0
        known = study.get_trials(deepcopy=False)
        completed = [trial for trial in known if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        waiting = [trial for trial in known if trial.state == TrialState.WAITING]
        queued = [_parameters(trial) for trial in (*completed, *waiting)]
        for trial in known:
            if trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state != TrialState.FAIL:
                continue
            parameters = _parameters(trial)
            if parameters and parameters not in queued:
                study.enqueue_trial(parameters)
                queued.append(parameters)
    return len(known), len(completed)


def _load_study(location: StudyLocation, directions: list[str]) -> "Study | None":
    """The stored study; None if there is none yet."""
    import optuna

    try:
        study = optuna.load_study(study_name=location.name, storage=location.storage)
    except KeyError:
        return None
    except Exception as error:  # noqa: BLE001 (each database driver has its own errors)
        expected = "a database that can be opened"
        raise ConfigError("hydra.sweeper.storage", location.storage, expected, one_line(error)) from None
    stored = [direction.name.lower() for direction in study.directions]
    if stored != directions:
        hint = f"the directions of a study cannot change; start another with hydra.sweeper.study_name={location.name}-2"
        raise ConfigError("hydra.sweeper.direction", ", ".join(directions), ", ".join(stored), hint)
    return study


def _parameters(trial: "FrozenTrial") -> dict[str, Any]:
    """The parameters of a trial; empty if its command ended before the sampler chose them."""
    return trial.params or dict(trial.system_attrs.get("fixed_params", {}))
