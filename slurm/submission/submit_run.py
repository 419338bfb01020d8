"""Submitting a run: check everything, show the plan, start one job, follow it.

Owns the order of a submission. Promises that nothing is started or queued unless the whole input is valid. The exit
code is 2 for invalid input, else that of `slurm.submission.tail_job`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from rich.markup import escape
from rich.text import Text

from pipeline.config import ModelConfig, RunConfig
from pipeline.config.cross_checks import check_parallel, check_run
from pipeline.config.learning_rates import describe_learning_rate
from pipeline.config.mesh_checks import check_context_heads, check_context_packing
from pipeline.config.model_directory import (
    describe_weights,
    expert_count,
    head_count,
    key_heads,
    longest_sequence,
    model_directory,
    model_family,
)
from pipeline.config.routing_shape import check_routing_replay
from pipeline.config.teacher_checks import check_vocabulary
from pipeline.environments import check_demonstrations, check_task, load_task
from pipeline.environments.eval_set_checks import check_eval_tasks, check_held_out
from pipeline.environments.rewards import check_rewards
from pipeline.errors import ConfigError, RollcallError
from pipeline.inference.engine_registry import find_engine
from pipeline.roles.redis import find_server
from pipeline.rollout.recorded_groups import RecordedRun, replayed_run
from pipeline.run.paths import RunPaths
from pipeline.topology.assignment import describe_plan
from pipeline.topology.gpu_memory import describe_memory, describe_mesh, trainer_ranks
from pipeline.topology.memory_choice import choose_memory
from pipeline.topology.memory_fit import check_memory
from pipeline.topology.plan import Plan, make_plan
from pipeline.topology.sizes import Sizes
from pipeline.tracking.tracker_protocol import check_trackers
from pipeline.train.batching.conversation_rows import ansi_highlight, check_data, first_trainable_row
from pipeline.train.batching.preference_rows import check_pairs
from pipeline.train.offline.job_queue import waiting_at
from pipeline.train.train_jobs import DemonstrationsInput, check_offline, read_job
from pipeline.utils import terminal
from pipeline.utils.user_commands import user_command
from slurm.agent.agent import Agent
from slurm.batch.executors import BatchExecutor, RunJob
from slurm.batch.site_checks import check_site, warnings
from slurm.registry import run_registry
from slurm.scheduler.allocation import split_components
from slurm.scheduler.scheduler_protocol import JobQueue
from slurm.scheduler.scheduler_registry import batch_scheduler, connect_scheduler
from slurm.submission.compose_config import compose_config
from slurm.submission.declined_options import refuse_launcher_key, refuse_option
from slurm.submission.launcher_signals import recorded_signals
from slurm.submission.local_job import LocalJob, check_shared_gpus, follow_here, lacking_gpus, refuse_lacking_gpus
from slurm.submission.size_cache import remembered_sizes
from slurm.submission.submission_warnings import check_agents, warnings_of
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
        config, chosen = fit_memory(config)
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


def check_submission(config: RunConfig, accepted: list[object] | None = None) -> Plan:
    """The plan of a config that can run here; `ConfigError` for the first problem.

    `accepted` collects the job shapes that the site has accepted, so that the scheduler checks each shape once.
    """
    check_run(config, longest_sequence(config.model))
    plan = make_plan(config)
    in_container = config.cluster.container.is_used  # the image has the packages, which this host may lack
    check_inputs(config)
    _check_architecture(config)
    if config.has_servers:
        check_parallel(config, head_count(config.model))
        engine = find_engine(config.inference.engine)
        engine.check_model(config, model_family(config.model), expert_count(config.model))
        _check_served_adapters(config.model)
        if not in_container:
            engine.check_installed()
            engine.check_config(config)
    if config.has_rollouts and config.streams.backend == "redis" and not in_container:
        find_server()
    if config.replay:
        RecordedRun(replayed_run(config)).check(config)
    run_registry.examine(config)
    # The memory model covers neither the adapters that clients of a serving run create, nor servers without a trainer.
    if config.resources.device == "cuda" and not (config.serve.enabled or config.evaluation.only):
        if config.resources.gpu_memory:
            check_memory(config, _sizes(config.model))
        elif config.cluster.on_this_machine:
            check_shared_gpus(config, lambda placed: check_memory(placed, _sizes(placed.model)))
    if not config.cluster.on_this_machine:
        queue = connect_scheduler(config.cluster.scheduler)
        accepted = [] if accepted is None else accepted
        text, shape = batch_text(config, plan, queue), (config.cluster, config.resources, plan)
        if shape not in accepted:
            check_site(config, plan, queue, text)
            accepted.append(shape)
    return plan


def fit_memory(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with the keys that `training.memory=auto` chooses, and a line for each of them."""
    if config.training.memory != "auto" or config.resources.device != "cuda":
        return config, ()
    if not config.resources.gpu_memory:
        expected = "resources.gpu_memory to choose by"
        raise ConfigError("training.memory", "auto", expected, "set resources.gpu_memory, such as 80G")
    return choose_memory(config, _sizes(config.model))


@cache
def _sizes(model: ModelConfig) -> Sizes:
    """The model's sizes, looked up once for all points of a sweep."""

    def count(model: ModelConfig) -> Sizes:
        from pipeline.train.model.model_size import sizes_of  # torch and transformers take seconds

        return sizes_of(model)

    return remembered_sizes(model, count)


@cache
def _check_context(model: ModelConfig, cp: int) -> None:
    """Raise `ConfigError` unless the model supports context parallelism; checked once for all points of a sweep."""
    check_context_heads(cp, head_count(model), key_heads(model))
    from pipeline.train.model.packing_probe import supports_packing  # torch and transformers take seconds

    located = model.model_copy(update={"path": str(model_directory(model))})
    check_context_packing(located, cp, supports_packing(located, requested=True))


@cache
def _check_served_adapters(model: ModelConfig) -> None:
    """Once for all points of a sweep."""
    if not (model.lora.travels_alone and expert_count(model)):
        return
    from pipeline.train.model.model_size import check_served_adapters  # torch and transformers take seconds

    check_served_adapters(model)


@cache
def _check_experts(model: ModelConfig, ep: int) -> None:
    """Raise `ConfigError` unless the model supports expert parallelism; checked once for all points of a sweep."""
    from pipeline.train.model.model_size import check_experts  # torch and transformers take seconds

    check_experts(model, ep)


def _check_architecture(config: RunConfig) -> None:
    """Raise `ConfigError` unless the model supports the keys that depend on its layers."""
    check_routing_replay(config)
    check_vocabulary(config)
    if config.training.routing_replay != "none":
        _check_routers(config.model)
    if config.training.mesh.ep > 1:
        _check_experts(config.model, config.training.mesh.ep)
    if config.training.mesh.cp > 1:
        _check_context(config.model, config.training.mesh.cp)


@cache
def _check_routers(model: ModelConfig) -> None:
    """Raise `ConfigError` unless the model's routers can replay; checked once for all points of a sweep."""
    from pipeline.train.model.model_size import check_routers  # torch and transformers take seconds

    check_routers(model)


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


def check_inputs(config: RunConfig) -> None:
    """Raise `ConfigError` unless the trackers and the task, or every pending job file, have valid inputs."""
    check_trackers(config)
    if not config.training.jobs:
        task = load_task(config.task, config.seed)
        check_task(task, config)
        check_agents(config)
        check_data(config)
        check_pairs(config)
        if config.has_rollouts:
            check_rewards(config.reward, task, config.task.name)
        if config.evaluation.only and config.evaluation.builtin_set:
            check_held_out(config.task, config.reward, config.seed)
        if config.has_rollouts or config.evaluation.only:
            check_eval_tasks(config)
        return
    path = Path(config.training.jobs).resolve()
    if path == config.directory.resolve():
        hint = "set output=… or name=…"
        raise ConfigError("training.jobs", str(path), "another folder than the run's own directory", hint)
    files = waiting_at(path)
    if not files and not RunPaths(config.directory).run.exists():  # a resumed run may have finished all of them
        expected = "a job file, or a folder with at least one *.json"
        raise ConfigError("training.jobs", config.training.jobs, expected, "see docs/jobs.md")
    for file in files:
        check_offline(file, job := read_job(file), config)
        if isinstance(job.inputs, DemonstrationsInput):
            check_demonstrations(load_task(config.task, config.seed), config.task.name, f"{file}: inputs.kind")


def batch_text(config: RunConfig, plan: Plan, queue: JobQueue) -> str:
    """The exact batch file of a submission, except for the run_id of a run that does not exist yet."""
    paths = RunPaths(config.directory.resolve())
    run_id = run_registry.identity(paths).run_id if paths.run.exists() else f"{config.name}-????????"
    return _executor(paths, config, plan, run_id, queue).batch_file()


def _executor(paths: RunPaths, config: RunConfig, plan: Plan, run_id: str, queue: JobQueue) -> BatchExecutor:
    scheduler = batch_scheduler(config.cluster.scheduler)
    return BatchExecutor(paths, config, plan, run_id=run_id, scheduler=scheduler, queue=queue)


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
    for line in describe_memory(config, _sizes(config.model)) if whole and config.resources.device == "cuda" else ():
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
        executor = _executor(paths, config, plan, run_registry.identity(paths).run_id, queue)
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
