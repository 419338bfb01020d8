"""One command from its overrides to its sweeper's end.

Owns Hydra's multirun, with the sweeper that the command names and our launcher. Promises that nothing is started unless
the command is right: keys, both ends of every axis, the site, the sweeper and its storage; that one process drives a
sweep at a time; and that the best point is told. There is no detaching: the sweeper lives in this process. Its jobs,
on a cluster, do not.

    search(["experiment=demo", "hydra/sweeper=optuna", …, "optim.lr=interval(1e-5,1e-3)"], launch)
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.progress import track

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.run_identity import differences
from pipeline.errors import ConfigError, RunStateError, SweepError, one_line
from pipeline.observability.number_format import plural
from pipeline.run.completion import is_finished
from pipeline.run.paths import SweepPaths
from pipeline.topology.plan import Plan
from pipeline.utils.terminal import console
from pipeline.utils.waiting import CLOCK, Clock
from slurm.registry import sweep_manifest
from slurm.registry.run_contents import located_config
from slurm.submission.compose_config import CONF, axis_ends, compose_config, prepare_fixed, split_axes
from slurm.submission.launcher_signals import recorded_signals
from slurm.submission.submit_sweep import PointLauncher
from slurm.submission.sweep_trials import claimed_directory, directory_of, named_point, refuse_run_directory
from slurm.submission.sweeps import hydra_launcher, optuna_studies
from slurm.submission.sweeps.hydra_settings import SweeperCommand, read_objective, read_sweeper_command, refuse_missing
from slurm.submission.sweeps.sweep_metric import SweepMetric
from slurm.submission.sweeps.trial_batches import StudyInterrupted, TrialBatches
from slurm.submission.tail_job import run_title

_MAX_TRIED = 50
"""Values of one axis that are tried before the sweeper chooses any."""
_MANY = 20
_PARTS = ("sweeper", "launcher")


@dataclass(frozen=True)
class SweepPlan:
    """A sweeper's command that was found right; nothing is written yet.

    Attributes:
        sweeper: the sweeper's part of Hydra's config.
        directions: which way is better, for each objective; empty where only the sweeper knows.
        first: the config of a point, with the first value of every axis, and its plan.
    """

    settings: SweeperCommand
    paths: SweepPaths
    sweeper: Mapping[str, Any]
    objective: SweepMetric
    directions: tuple[str, ...]
    first: RunConfig
    plan: Plan


def run_sweeper(
    overrides: Sequence[str],
    launch: PointLauncher,
    *,
    dry_run: bool = False,
    detach: bool = False,
    clock: Clock = CLOCK,
) -> int:
    """Run the sweeper that these overrides name; 0, or 130 or 143 after a signal. Errors say what was wrong."""
    settings = read_sweeper_command(overrides)
    if detach:
        hint = "the sweeper chooses points in this process: start it with nohup, or in tmux"
        raise ConfigError("option", "--detach", "no sweeper", hint)
    hydra = _hydra()
    found = _prepare(hydra, settings, launch)
    sweeper, axes = found.sweeper["_target_"].rpartition(".")[2], _axes(settings, found.sweeper)
    print(f"sweep {found.paths.root}: {sweeper} over {' '.join(axes) or 'nothing'}", flush=True)
    launch.show(found.first, found.plan, dry_run)
    if dry_run:
        return 0
    with claimed_directory(found.paths, found.first.cluster), recorded_signals() as told:
        study = TrialBatches(found.paths, settings.fixed, launch, found.objective, told, clock)
        try:
            _drive(hydra, found, study)
        except StudyInterrupted as end:
            print(f"interrupted; the same command {_running_trials(found)}", file=sys.stderr)
            return end.exit_code
    _print_end(found)
    return 0


def _hydra() -> Hydra:
    """Hydra for `conf/`, with our launcher known to it."""
    hydra_launcher.register_launcher()
    hydra = Hydra.create_main_hydra2("submit", create_config_search_path(str(CONF.resolve())))
    GlobalHydra.instance().clear()  # each point is composed by itself, which refuses to be the second
    return hydra


def _prepare(hydra: Hydra, settings: SweeperCommand, launch: PointLauncher) -> SweepPlan:
    """The command, looked at from all sides; `ConfigError` for the first thing that is wrong."""
    refuse_missing(settings, hydra.config_loader.get_group_options("hydra/sweeper"))
    tree = _composed(hydra, [*prepare_fixed(settings.fixed), *settings.axes, *settings.hydra])
    sweeper: dict[str, Any] = tree["sweeper"]
    unset = OmegaConf.to_container(OmegaConf.structured(hydra_launcher.RollcallQueueConf), resolve=False)
    assert isinstance(unset, dict)
    objective = read_objective(tree["launcher"], {str(key): value for key, value in unset.items()})
    directions: tuple[str, ...] = ()
    if optuna_studies.is_optuna(sweeper):
        optuna_studies.refuse_grid(sweeper)
        directions = tuple(optuna_studies.directions_of(sweeper, settings.given))
        if len(directions) != len(objective.names):
            expected = f"{plural(len(objective.names), 'direction')}, one for each of {objective}"
            raise ConfigError("hydra.sweeper.direction", ", ".join(directions), expected)
    configs = _tried(settings, sweeper)
    _refuse_absent_job(objective, configs)
    paths = SweepPaths(directory_of(configs))
    refuse_run_directory(paths)
    _refuse_changed(paths, settings)
    first, *others = [config.model_copy(update={"name": "point", "output": paths.root}) for config in configs]
    plan = launch.check(first)
    for config in track(others, "checking", console=console(), transient=True, disable=len(others) < _MANY):
        launch.check(config)
    return SweepPlan(settings, paths, sweeper, objective, directions, first, plan)


def _composed(hydra: Hydra, overrides: Sequence[str]) -> dict[str, Any]:
    """Hydra's own part of the config."""
    try:
        tree = hydra.compose_config("config", list(overrides), RunMode.MULTIRUN)
        parts = {name: OmegaConf.to_container(tree.hydra[name], resolve=name == "sweeper") for name in _PARTS}
    except Exception as error:  # noqa: BLE001 (of a mistake Hydra also raises what broke on it inside)
        reason = one_line(error)
        raise ConfigError("overrides", " ".join(overrides), "overrides that compose", reason) from None
    return parts


def _axes(settings: SweeperCommand, sweeper: Mapping[str, Any]) -> tuple[str, ...]:
    """What the sweeper chooses from: what a file gives as its `params`, and what the command says."""
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    return split_axes([*params, *settings.fixed, *settings.axes])[1]


def _tried(settings: SweeperCommand, sweeper: Mapping[str, Any]) -> list[RunConfig]:
    """Configs with each listed value, and both ends of each interval; the others at their first meanwhile."""
    ends = [axis_ends(axis, _MAX_TRIED) for axis in _axes(settings, sweeper)]
    first = [values[0] for values in ends]
    points = [first]
    for place, values in enumerate(ends):
        points += [[*first[:place], value, *first[place + 1 :]] for value in values[1:]]
    configs = []
    for point in track(points, "composing", console=console(), transient=True, disable=len(points) < _MANY):
        with named_point(point):
            configs.append(compose_config([*settings.fixed, *point]))
    return configs


def _refuse_absent_job(objective: SweepMetric, configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` when a run does not do the training job whose rows the objective is read from."""
    for config in configs:
        done = [job for job, does in (("sft", config.has_sft), ("rl", config.has_rollouts)) if does]
        if done and objective.job not in done:  # jobs of files say themselves what they are
            expected = f"{done[0]}, the only job that the run does (training.steps={config.training.steps})"
            raise ConfigError("hydra.launcher.job", objective.job, expected, f"set it to {done[0]}")


def _refuse_changed(paths: SweepPaths, settings: SweeperCommand) -> None:
    """Raise `RunStateError` when points that are there were made with other fixed values: they would not compare."""
    kept = sweep_manifest.load_manifest(paths)
    for point in kept.points if kept else ():
        old = read_frozen_config(paths.point(point.name))
        if old is None:
            continue
        new = compose_config([*settings.fixed, *point.overrides])
        new = new.model_copy(update={"name": point.name, "output": paths.root})
        if changes := differences(old, located_config(new)):
            hint = f"go on with it as it was, or give the new one another name (name={paths.root.name}-2)"
            expected = f"the values its points were made with, but {'; '.join(changes)}"
            raise RunStateError("name", paths.root.name, expected, hint)
        return


def _drive(hydra: Hydra, found: SweepPlan, study: TrialBatches) -> None:
    """Run the sweeper to its end; what it cannot bear becomes a `SweepError`."""
    told: dict[str, Any] = {}
    if optuna_studies.is_optuna(found.sweeper):
        kept = optuna_studies.existing_study(found.sweeper, found.settings.given, found.paths.root)
        told = optuna_studies.resume_study(kept, found.sweeper, list(found.directions))
    own = {f"hydra.sweeper.{key}": value for key, value in told.items()}
    own |= {"hydra.sweep.dir": str(found.paths.root), "hydra.sweep.subdir": ".", "hydra.output_subdir": None}
    written = [f"{key}={_override_text(value)}" for key, value in own.items()]
    overrides = [*prepare_fixed(found.settings.fixed), *found.settings.axes, *found.settings.hydra, *written]
    try:
        hydra.multirun("config", study, overrides, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise SweepError(f"the sweeper gave up: {' '.join(str(error).split()) or type(error).__name__}") from error


def _override_text(value: object) -> str:
    """A value in the grammar of overrides."""
    if value is None:
        return "null"
    return QuotedString(value, Quote.single).with_quotes() if isinstance(value, str) else str(value)


def _print_end(found: SweepPlan) -> None:
    """Every point with its number, the best first where it is known which way is better."""
    kept = sweep_manifest.load_manifest(found.paths)
    numbers = {}
    for point in kept.points if kept else ():
        run = found.paths.point(point.name)
        if is_finished(run):
            try:
                numbers[point.number] = found.objective.of(run)
            except SweepError:
                continue
    if kept is None or not numbers:
        return
    minimize = found.directions == ("minimize",)
    ranked = sorted(numbers, key=lambda number: numbers[number], reverse=not minimize)
    print(f"{plural(len(ranked), 'point')} by {found.objective}")
    for place, number in enumerate(ranked):
        best = "  best" if place == 0 and len(found.directions) == 1 else ""
        values = " ".join(f"{value:<10.4g}" for value in numbers[number])
        print(f"  {values}  {kept.points[number]}{best}")
    name = shlex.quote(run_title(found.paths.root))
    print(f"  table       python launchers/runs.py sweep={name}", flush=True)


def _running_trials(found: SweepPlan) -> str:
    return f"goes on with {run_title(found.paths.root)}: points that finished are kept, the others resumed"
