"""A sweeper's command, from its overrides to the sweeper's end.

Owns Hydra's multirun, with the sweeper that the command names and our launcher. Promises that nothing is started unless
the command is valid: keys, both ends of every axis, the site, the sweeper and its storage; that one process drives a
sweep at a time; and that the best point is printed. A sweeper cannot be detached, since it runs in this process. Its
jobs on a cluster outlive the process.

    run_sweeper(["experiment=demo", "hydra/sweeper=optuna", …, "optim.lr=interval(1e-5,1e-3)"], launch)
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
from pipeline.utils.user_commands import user_command
from pipeline.utils.waiting import CLOCK, Clock
from slurm.registry import sweep_manifest
from slurm.registry.run_contents import located_config
from slurm.submission.compose_config import (
    CONF,
    ConfigComposer,
    axis_ends,
    compose_config,
    prepare_fixed,
    register_defaults,
    split_axes,
)
from slurm.submission.launcher_signals import recorded_signals
from slurm.submission.submit_sweep import PointLauncher
from slurm.submission.sweep_trials import claimed_directory, directory_of, named_point, refuse_run_directory
from slurm.submission.sweeps import hydra_launcher, optuna_studies
from slurm.submission.sweeps.hydra_settings import SweeperCommand, read_objective, read_sweeper_command, refuse_missing
from slurm.submission.sweeps.sweep_metric import SweepMetric
from slurm.submission.sweeps.trial_batches import StudyInterrupted, TrialBatches
from slurm.submission.tail_job import run_title

_MAX_TRIED = 50
"""Values of one axis that are checked before the sweeper chooses any."""
_MANY = 20
_PARTS = ("sweeper", "launcher")


@dataclass(frozen=True)
class SweepPlan:
    """A valid sweeper's command; nothing is written yet.

    Attributes:
        sweeper: the sweeper's part of Hydra's config.
        directions: `maximize` or `minimize` for each objective; empty unless the sweeper is Optuna's.
        first: the config of a point with the first value of every axis.
        plan: the plan of `first`.
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
    """Run the sweeper that these overrides name. Returns 0, or 130 or 143 after a signal."""
    settings = read_sweeper_command(overrides)
    if detach:
        hint = "the sweeper chooses points in this process: start it with nohup, or in tmux"
        raise ConfigError("option", "--detach", "a command without a sweeper", hint)
    hydra = _hydra()
    sweep = _prepare(hydra, settings, launch)
    sweeper, axes = sweep.sweeper["_target_"].rpartition(".")[2], _axes(settings, sweep.sweeper)
    print(f"sweep {sweep.paths.root}: {sweeper} over {' '.join(axes) or 'nothing'}", flush=True)
    launch.show(sweep.first, sweep.plan, dry_run)
    if dry_run:
        return 0
    with claimed_directory(sweep.paths, sweep.first.cluster), recorded_signals() as received:
        study = TrialBatches(sweep.paths, settings.fixed, launch, sweep.objective, received, clock)
        try:
            _drive(hydra, sweep, study)
        except StudyInterrupted as end:
            print(f"interrupted; the same command {_running_trials(sweep)}", file=sys.stderr)
            return end.exit_code
    _print_end(sweep)
    return 0


def _hydra() -> Hydra:
    """Hydra for `conf/`, with our launcher registered."""
    hydra_launcher.register_launcher()
    register_defaults()
    hydra = Hydra.create_main_hydra2("submit", create_config_search_path(str(CONF.resolve())))
    GlobalHydra.instance().clear()  # each point is composed again, which a second global instance would refuse
    return hydra


def _prepare(hydra: Hydra, settings: SweeperCommand, launch: PointLauncher) -> SweepPlan:
    """Check the whole command; `ConfigError` for the first mistake."""
    refuse_missing(settings, hydra.config_loader.get_group_options("hydra/sweeper"))
    tree = _composed(hydra, [*prepare_fixed(settings.fixed), *settings.axes, *settings.hydra])
    sweeper: dict[str, Any] = tree["sweeper"]
    unset = OmegaConf.to_container(OmegaConf.structured(hydra_launcher.RollcallQueueConf), resolve=False)
    assert isinstance(unset, dict)
    objective = read_objective(tree["launcher"], {str(key): value for key, value in unset.items()})
    directions: tuple[str, ...] = ()
    if optuna_studies.is_optuna(sweeper):
        optuna_studies.refuse_grid(sweeper)
        directions = tuple(optuna_studies.directions_of(sweeper, settings.is_set))
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
    """The parts of Hydra's own config for the sweeper and the launcher."""
    try:
        tree = hydra.compose_config("config", list(overrides), RunMode.MULTIRUN)
        parts = {name: OmegaConf.to_container(tree.hydra[name], resolve=name == "sweeper") for name in _PARTS}
    except Exception as error:  # noqa: BLE001 (a mistake in an override can raise any error inside Hydra)
        reason = one_line(error)
        raise ConfigError("overrides", " ".join(overrides), "overrides that compose", reason) from None
    return parts


def _axes(settings: SweeperCommand, sweeper: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes that the sweeper chooses from: the `params` of its file, and those of the command."""
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    return split_axes([*params, *settings.fixed, *settings.axes])[1]


def _tried(settings: SweeperCommand, sweeper: Mapping[str, Any]) -> list[RunConfig]:
    """A config for each listed value and both ends of each interval, the other axes at their first value."""
    ends = [axis_ends(text, _MAX_TRIED) for text in _axes(settings, sweeper)]
    first = [values[0] for values in ends]
    points = [first]
    for axis, values in enumerate(ends):
        points += [[*first[:axis], value, *first[axis + 1 :]] for value in values[1:]]
    configs, composer = [], ConfigComposer()
    for point in track(points, "composing", console=console(), transient=True, disable=len(points) < _MANY):
        with named_point(point):
            configs.append(composer.compose([*settings.fixed, *point]))
    return configs


def _refuse_absent_job(objective: SweepMetric, configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` if a run does not execute the training job whose metrics have the objective."""
    for config in configs:
        phases = (("sft", config.has_sft), ("preference", config.has_preference), ("rl", config.has_rl))
        done = [job for job, does in phases if does]
        if done and objective.job not in done:  # job files name their own kinds
            expected = f"{done[0]}, the only training job of the run (training.steps={config.training.steps})"
            raise ConfigError("hydra.launcher.job", objective.job, expected, f"set it to {done[0]}")


def _refuse_changed(paths: SweepPaths, settings: SweeperCommand) -> None:
    """Raise `RunStateError` if existing points have other fixed values, so that results would not be comparable."""
    recorded = sweep_manifest.load_manifest(paths)
    for point in recorded.points if recorded else ():
        old = read_frozen_config(paths.point(point.name))
        if old is None:
            continue
        new = compose_config([*settings.fixed, *point.overrides])
        new = new.model_copy(update={"name": point.name, "output": paths.root})
        if changes := differences(old, located_config(new)):
            hint = f"keep the fixed values, or give the new sweep another name (name={paths.root.name}-2)"
            expected = f"the values of its existing points, but {'; '.join(changes)}"
            raise RunStateError("name", paths.root.name, expected, hint)
        return


def _drive(hydra: Hydra, sweep: SweepPlan, study: TrialBatches) -> None:
    """Run the sweeper to its end; its errors become a `SweepError`."""
    resumed: dict[str, Any] = {}
    if optuna_studies.is_optuna(sweep.sweeper):
        location = optuna_studies.existing_study(sweep.sweeper, sweep.settings.is_set, sweep.paths.root)
        resumed = optuna_studies.resume_study(location, sweep.sweeper, list(sweep.directions))
    own = {f"hydra.sweeper.{key}": value for key, value in resumed.items()}
    own |= {"hydra.sweep.dir": str(sweep.paths.root), "hydra.sweep.subdir": ".", "hydra.output_subdir": None}
    written = [f"{key}={_override_text(value)}" for key, value in own.items()]
    overrides = [*prepare_fixed(sweep.settings.fixed), *sweep.settings.axes, *sweep.settings.hydra, *written]
    try:
        hydra.multirun("config", study, overrides, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise SweepError(f"the sweeper failed: {' '.join(str(error).split()) or type(error).__name__}") from error


def _override_text(value: object) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    return QuotedString(value, Quote.single).with_quotes() if isinstance(value, str) else str(value)


def _print_end(sweep: SweepPlan) -> None:
    """Print every point with its values, best first; without directions, higher values first."""
    recorded = sweep_manifest.load_manifest(sweep.paths)
    numbers = {}
    for point in recorded.points if recorded else ():
        run = sweep.paths.point(point.name)
        if is_finished(run):
            try:
                numbers[point.number] = sweep.objective.of(run)
            except SweepError:
                continue
    if recorded is None or not numbers:
        return
    minimize = sweep.directions == ("minimize",)
    ranked = sorted(numbers, key=lambda number: numbers[number], reverse=not minimize)
    print(f"{plural(len(ranked), 'point')} by {sweep.objective}")
    for rank, number in enumerate(ranked):
        best = "  best" if rank == 0 and len(sweep.directions) == 1 else ""
        values = " ".join(f"{value:<10.4g}" for value in numbers[number])
        print(f"  {values}  {recorded.points[number]}{best}")
    name = shlex.quote(run_title(sweep.paths.root))
    print(f"  table       {user_command('runs')} sweep={name}", flush=True)


def _running_trials(sweep: SweepPlan) -> str:
    return f"resumes {run_title(sweep.paths.root)}: finished points are kept, the others continue"
