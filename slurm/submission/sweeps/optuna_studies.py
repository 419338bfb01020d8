"""What an Optuna study needs beside its sweeper: where it is kept, and how it is taken up again.

Owns Optuna's storage before its sweeper opens it. Promises that the same command completes a study: trials that did not
come to a number, since they failed or their command was ended, are asked for again with the same parameters, which are
the same runs; and only those new ones are run that `n_trials` still lacks. Imports Optuna only where its sweeper is
named.

The sweeper by itself forgets a study that has no storage, leaves the trials of a command that was killed running for
ever, and runs `n_trials` more each time.
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
class StudyPlace:
    """Where a study is kept: in the sweep's directory, unless the command says where else."""

    storage: str | None
    name: str


def is_optuna(sweeper: Mapping[str, Any]) -> bool:
    """Whether this part of Hydra's config is Optuna's sweeper."""
    return sweeper.get("_target_") == SWEEPER


def directions_of(sweeper: Mapping[str, Any], given: Callable[[str], bool]) -> list[str]:
    """`maximize` or `minimize` for each objective; `ConfigError` unless the command says which.

    Optuna's own default is to minimize, which is wrong for every reward.
    """
    value = sweeper["direction"]
    if not given("hydra.sweeper.direction"):
        hint = "add hydra.sweeper.direction=maximize, or minimize"
        raise ConfigError("hydra.sweeper.direction", None, "which way is better", hint)
    directions = [getattr(one, "name", str(one)) for one in (value if isinstance(value, list) else [value])]
    if wrong := [one for one in directions if one not in ("maximize", "minimize")]:
        raise ConfigError("hydra.sweeper.direction", wrong[0], "maximize or minimize, for each objective")
    return directions


def refuse_grid(sweeper: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a sampler that counts trials instead of looking at what came of them."""
    if str(sweeper["sampler"].get("_target_")).endswith(".GridSampler"):
        hint = "plain -m runs every combination: leave Hydra's keys out"
        raise ConfigError("hydra/sweeper/sampler", "grid", "a sampler that chooses", hint)


def existing_study(sweeper: Mapping[str, Any], given: Callable[[str], bool], directory: Path) -> StudyPlace:
    """Where the study is, with what the command leaves open filled in."""
    storage = sweeper["storage"]
    if storage is None and not given("hydra.sweeper.storage"):
        storage = f"sqlite:///{directory / FILE}"
    return StudyPlace(storage, sweeper["study_name"] or directory.name)


def resume_study(kept: StudyPlace, sweeper: Mapping[str, Any], directions: list[str]) -> dict[str, Any]:
    """Have unfinished trials asked for again; what the sweeper has to be told differently: below `hydra.sweeper`.

    `ConfigError` for a storage that cannot be opened, or a study of other directions.
    """
    sampler = sweeper["sampler"]
    told: dict[str, Any] = {"storage": kept.storage, "study_name": kept.name}
    if kept.storage is None:
        return told
    known, settled = _asked_again(kept, directions)
    told["n_trials"] = max(0, sweeper["n_trials"] - settled)
    if known and sampler.get("seed") is not None:  # with the same seed it would draw the same points again
        told["sampler.seed"] = sampler["seed"] + known
    return told


def _asked_again(kept: StudyPlace, directions: list[str]) -> tuple[int, int]:
    """Queue what has no number yet; how many trials there were, and how many have one."""
    import optuna
    from optuna.trial import TrialState

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = _opened(kept, directions)
        if study is None:
            return 0, 0
        known = study.get_trials(deepcopy=False)
        settled = [trial for trial in known if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        waiting = [trial for trial in known if trial.state == TrialState.WAITING]
        asked = [_parameters(trial) for trial in (*settled, *waiting)]
        for trial in known:
            if trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state != TrialState.FAIL:
                continue
            parameters = _parameters(trial)
            if parameters and parameters not in asked:
                study.enqueue_trial(parameters)
                asked.append(parameters)
    return len(known), len(settled)


def _opened(kept: StudyPlace, directions: list[str]) -> "Study | None":
    """The study, if there is one yet."""
    import optuna

    try:
        study = optuna.load_study(study_name=kept.name, storage=kept.storage)
    except KeyError:
        return None
    except Exception as error:  # noqa: BLE001 (drivers of databases raise what they like)
        expected = "a database that can be opened"
        raise ConfigError("hydra.sweeper.storage", kept.storage, expected, one_line(error)) from None
    found = [direction.name.lower() for direction in study.directions]
    if found != directions:
        hint = f"the directions of a study stay; start another with hydra.sweeper.study_name={kept.name}-2"
        raise ConfigError("hydra.sweeper.direction", ", ".join(directions), ", ".join(found), hint)
    return study


def _parameters(trial: "FrozenTrial") -> dict[str, Any]:
    """What a trial was, or will be, asked with; empty if its command ended before that was settled."""
    return trial.params or dict(trial.system_attrs.get("fixed_params", {}))
