"""Submitting a run: check everything (`submission_checks`), show the plan, start one job, follow it.

Owns the order of a submission. Promises that nothing is started or queued unless the whole input is valid. The exit
code is 2 for invalid input, else that of `slurm.submission.tail_job`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from rich.markup import escape
from rich.text import Text

from pipeline.config import RunConfig
from pipeline.config.learning_rates import describe_learning_rate
from pipeline.config.model_directory import describe_weights
from pipeline.environments.games.game_process import shared_games
from pipeline.errors import ConfigError, RollcallError
from pipeline.topology.assignment import describe_plan
from pipeline.topology.gpu_memory import describe_memory, describe_mesh
from pipeline.topology.memory_budget import trainer_ranks
from pipeline.topology.plan import Plan
from pipeline.train.batching.conversation_rows import ansi_highlight, first_trainable_row
from pipeline.utils import terminal
from pipeline.utils.user_commands import user_command
from slurm.agent.agent import Agent
from slurm.batch.executors import RunJob
from slurm.batch.site_checks import warnings
from slurm.registry import run_registry
from slurm.scheduler.allocation import split_components
from slurm.scheduler.scheduler_registry import connect_scheduler
from slurm.submission.compose_config import compose_config
from slurm.submission.declined_options import refuse_launcher_key, refuse_option
from slurm.submission.launcher_forks import launcher_forks
from slurm.submission.launcher_signals import recorded_signals
from slurm.submission.local_job import LocalJob, follow_here, lacking_gpus, refuse_lacking_gpus
from slurm.submission.submission_checks import batch_text, check_submission, fit_memory, make_executor, run_sizes
from slurm.submission.submission_warnings import warnings_of
from slurm.submission.submit_sweep import PointLauncher, sweep
from slurm.submission.sweeps.hydra_settings import names_hydra
from slurm.submission.sweeps.run_sweeper import run_sweeper
from slurm.submission.tail_job import conclude_run, follow_job, print_job


def main(argv: Sequence[str], compose: Callable[[Sequence[str]], RunConfig] | None = None) -> int:
    """Submit what the command-line arguments describe. Returns the exit code.

    `compose` turns overrides into a config, for commands that submit another kind of run. Default: `compose_config`.
    """
    try:
        options, overrides = _read(argv)
        if options.multirun and compose is not None:
            raise ConfigError("option", "--multirun", "one run", "job files name the directories of their results")
        if options.multirun and names_hydra(overrides):
            return run_sweeper(overrides, one_run(), dry_run=options.dry_run, detach=options.detach)
        if options.multirun:
            return sweep(overrides, one_run(), dry_run=options.dry_run, detach=options.detach)
        config = (compose or compose_config)(overrides)
        if not options.cfg:
            _refuse_serving(config)
        if options.cfg:
            print(config.model_dump_json(indent=2))
            return 0
        if options.detach and config.cluster.on_this_machine:
            hint = "a local run ends with its launcher; start it with nohup, or in tmux"
            raise ConfigError("option", "--detach", "cluster=slurm", hint)
        with nullcontext() if options.dry_run else launcher_forks(config):
            config, chosen = fit_memory(config)
            with shared_games():
                plan = check_submission(config)
                print_plan(config, plan, _warnings(config, plan, dry_run=options.dry_run), whole=options.dry_run)
            for line in chosen:
                print(f"  {line}", flush=True)
            return 0 if options.dry_run else start_run(config, plan, detach=options.detach)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options and overrides of a command line; `ConfigError` for an unknown option."""
    expected = "one of --cfg, --detach, --dry-run, --help, --multirun"
    try:
        options, overrides = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("option", " ".join(argv), expected, str(error)) from None
    unknown = [argument for argument in overrides if argument.startswith("-")]
    if unknown:
        refuse_option(unknown[0], expected)
    if options.cfg and options.multirun:
        raise ConfigError("option", "--cfg", "one run", "leave out --multirun, and give each key one value")
    for text in overrides:
        refuse_launcher_key(text.partition("=")[0].lstrip("+~"), text.partition("=")[2])
    if not options.multirun and (named := names_hydra(overrides)):
        raise ConfigError("option", named, "-m: only a sweeper reads Hydra's own keys", "add -m")
    if options.cfg and "job" in overrides:  # Hydra's form is `--cfg job`
        overrides.remove("job")
    return options, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=user_command("submit"),
        description=f"Submit one run: {user_command('submit')} experiment=demo cluster=local key=value …",
        epilog="Run the same command again to resume an interrupted run. Keys: docs/configuration.md.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--cfg", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; start nothing")
    parser.add_argument("--detach", action="store_true", help="submit the job to the queue and do not follow it")
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep, one run for each point: docs/sweeps.md")
    return parser


def _refuse_serving(config: RunConfig) -> None:
    if config.serve.enabled:
        raise ConfigError(
            "serve.enabled",
            True,
            f"false: clients need the gateway of {user_command('serve')}",
            f"use {user_command('serve')} instead",
        )


def _check_point(config: RunConfig, accepted: list[object]) -> Plan:
    """Check a point of a sweep as `check_submission` does; refuse a serving run, and keys that are chosen."""
    _refuse_serving(config)
    if config.training.memory == "auto":
        hint = "set the keys that --dry-run of one point chooses"
        raise ConfigError("training.memory", "auto", "explicit in a sweep, whose points would differ in speed", hint)
    return check_submission(config, accepted)


def _warnings(config: RunConfig, plan: Plan, *, dry_run: bool = False) -> list[str]:
    """The warnings about a run; `dry_run` adds a lack of free GPUs on this machine."""
    if not config.cluster.on_this_machine:
        return [*warnings_of(config), *warnings(config, connect_scheduler(config.cluster.scheduler))]
    lacking = lacking_gpus(plan) if dry_run else ""
    return [*warnings_of(config), *([f"this machine, now: {lacking}"] if lacking else [])]


def print_plan(config: RunConfig, plan: Plan, warned: Sequence[str] = (), *, whole: bool = False) -> None:
    """Print the placement of the roles and the warnings before anything is started.

    `whole` adds the roles' memory on a GPU and the batch file for the scheduler.
    """
    console = terminal.console(highlight=False)
    console.print(f"[bold]{config.name}[/]  {escape(_what_it_trains(config))}", soft_wrap=True)
    services = len(split_components(plan)[0]) if config.resources.hetjob else 0
    for line in describe_plan(plan, without_gpus=services):
        console.print(f"  {line}")
    console.print(f"  {escape(describe_weights(config.model))}", soft_wrap=True)
    if chosen := describe_learning_rate(config):
        print(f"  {chosen}", flush=True)
    if whole and trainer_ranks(config) > 1 and not config.evaluation.only:
        print(f"  mesh of the trainer: {describe_mesh(config)}", flush=True)
    for line in describe_memory(config, run_sizes(config)) if whole and config.resources.device == "cuda" else ():
        print(f"  {line}", flush=True)
    if (shown := first_trainable_row(config)) is not None:
        first, endless = shown
        console.print("\nThe first row; trained tokens are green:")
        console.print(Text.from_ansi(ansi_highlight(first)), end="\n\n")
        warned = [*warned, endless] if endless else warned
    for warning in warned:
        print(f"warning: {warning}", file=sys.stderr)
    if whole and not config.cluster.on_this_machine:
        print(f"\n{batch_text(config, plan, connect_scheduler(config.cluster.scheduler))}", end="", flush=True)


def _what_it_trains(config: RunConfig) -> str:
    if config.serve.enabled:
        return f"adapters on {config.model.path}, as clients of the Tinker API request"
    if config.evaluation.only:
        return f"evaluation of {config.model.lora.adapter or config.model.path}"
    if config.training.jobs:
        return f"the jobs of {config.training.jobs}"
    start = config.training.sft
    if config.replay:
        return f"replay of {config.replay}, {config.loss.name}, {config.training.steps} steps"
    if not config.has_rollouts:
        phase = config.preference if config.has_preference else start
        length = f"{phase.steps} steps" if phase.steps else f"{phase.epochs:g} epochs"
        if config.has_preference:
            return f"{config.data.path}, preferences by {config.preference.loss}, {length}"
        return f"{config.data.path or config.task.name}, SFT alone, {length}"
    return f"{config.task.name}, {config.loss.name}, {config.training.steps} steps"


def start_run(config: RunConfig, plan: Plan, *, detach: bool = False) -> int:
    """Start the job and follow it to its end. Returns its exit code; 0 for a detached job, which is not followed."""
    if config.cluster.on_this_machine:
        return run_here(config, plan)
    with recorded_signals() as interrupted:
        job = submit_one(config, plan)
        print_job(job)
        return 0 if detach else follow_job(job, interrupted)


def submit_one(config: RunConfig, plan: Plan) -> RunJob:
    """Queue the job of a run; it is on record when this returns.

    If this raises, no job is queued, except after `SchedulerSilent`. If the job appears later, it finds nothing to run,
    and further submissions are refused until it has ended.
    """
    queue = connect_scheduler(config.cluster.scheduler)
    with run_registry.claimed_run(config) as paths, run_registry.job_replaced(paths):
        executor = make_executor(paths, config, plan, run_registry.identity(paths).run_id, queue)
        job = executor.submit(Agent(paths.root))
        assert isinstance(job, RunJob)
        try:
            run_registry.record_job(paths, config.cluster.scheduler, job.job_id)
        except BaseException:
            job.cancel()
            raise
    return job


def run_here(config: RunConfig, plan: Plan) -> int:
    """Start the job on this machine and follow it to its end. Returns its exit code. The job ends with this process.

    `PlanError` if the machine has too few free GPUs.
    """
    refuse_lacking_gpus(plan)
    with run_registry.claimed_run(config) as paths, recorded_signals() as interrupted:
        job = LocalJob(paths, config, plan)
        follow_here(job, interrupted)
        return conclude_run(paths, job.attempt, interrupted)


def one_run() -> PointLauncher:
    """The functions that a sweep calls for each point. The scheduler checks points with equal job shapes once."""
    return PointLauncher(
        check=partial(_check_point, accepted=[]),
        show=lambda config, plan, whole: print_plan(config, plan, _warnings(config, plan), whole=whole),
        run=run_here,
        submit=lambda config, plan: submit_one(config, plan).job_id,
        connect=connect_scheduler,
    )
