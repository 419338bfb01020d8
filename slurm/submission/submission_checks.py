"""Everything that can be wrong with a run, checked before it starts.

Owns the order of the checks: keys, placement, inputs, the model's architecture, servers, memory, and on a cluster the
site. Promises that the first problem is one `ConfigError`, and that nothing is started or queued. Also the batch file,
which the site's check needs.
"""

from functools import cache
from pathlib import Path

from pipeline.config import ModelConfig, RunConfig
from pipeline.config.cross_checks import check_parallel, check_run
from pipeline.config.dtype_checks import check_dtype
from pipeline.config.mesh_checks import check_context_heads, check_context_packing
from pipeline.config.model_directory import (
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
from pipeline.environments.games.game_process import shared_games
from pipeline.environments.rewards import check_rewards
from pipeline.errors import ConfigError
from pipeline.inference.engine_registry import find_engine
from pipeline.roles.redis import find_server
from pipeline.rollout.recorded_groups import RecordedRun, replayed_run
from pipeline.run.paths import RunPaths
from pipeline.topology.memory_choice import choose_memory
from pipeline.topology.memory_fit import check_memory
from pipeline.topology.plan import Plan, make_plan
from pipeline.topology.sizes import Sizes, sizes_of_run
from pipeline.tracking.tracker_protocol import check_trackers
from pipeline.train.batching.conversation_rows import check_data
from pipeline.train.batching.preference_rows import check_pairs
from pipeline.train.offline.job_queue import waiting_at
from pipeline.train.train_jobs import DemonstrationsInput, check_offline, read_job
from slurm.batch.executors import BatchExecutor
from slurm.batch.site_checks import check_site
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import JobQueue
from slurm.scheduler.scheduler_registry import batch_scheduler, connect_scheduler
from slurm.submission.launcher_forks import call_with_torch
from slurm.submission.local_job import check_mps, check_server_gpus, check_shared_gpus
from slurm.submission.size_cache import remembered_sizes
from slurm.submission.submission_warnings import check_agents

_MODEL_SIZE = "pipeline.train.model.model_size"


@shared_games()
def check_submission(config: RunConfig, accepted: list[object] | None = None) -> Plan:
    """The plan of a config that can run here; `ConfigError` for the first problem.

    `accepted` collects the job shapes that the site has accepted, so that the scheduler checks each shape once.
    """
    check_run(config, longest_sequence(config.model))
    _check_dtypes(config)
    plan = make_plan(config)
    in_container = config.cluster.container.is_used  # the image has the packages, which this host may lack
    check_inputs(config)
    _check_architecture(config)
    if config.has_servers:
        _check_engine(config)
    if config.has_rollouts and config.streams.backend == "redis" and not in_container:
        find_server()
    if config.replay:
        RecordedRun(replayed_run(config)).check(config)
    run_registry.examine(config)
    # The memory model covers neither the adapters that clients of a serving run create, nor servers without a trainer.
    if config.resources.device == "cuda" and not (config.serve.enabled or config.evaluation.only):
        if config.resources.gpu_memory:
            check_memory(config, run_sizes(config))
        elif config.cluster.on_this_machine:
            check_shared_gpus(config, lambda placed: check_memory(placed, run_sizes(placed)))
    if not config.cluster.on_this_machine:
        queue = connect_scheduler(config.cluster.scheduler)
        accepted = [] if accepted is None else accepted
        text, shape = batch_text(config, plan, queue), (config.cluster, config.resources, plan)
        if shape not in accepted:
            check_site(config, plan, queue, text)
            accepted.append(shape)
    return plan


def _check_engine(config: RunConfig) -> None:
    """Raise `ConfigError` unless the run's engine can serve the model as configured."""
    check_parallel(config, head_count(config.model))
    engine = find_engine(config.inference.engine)
    engine.check_model(config, model_family(config.model), expert_count(config.model))
    _check_served_adapters(config.model)
    if not config.cluster.container.is_used:
        engine.check_installed()
        engine.check_config(config)
    if config.cluster.on_this_machine:
        check_server_gpus(config)
        check_mps(config)


def _check_dtypes(config: RunConfig) -> None:
    """The compute type fits the run's model and those of `serve.bases`."""
    check_dtype(config.model)
    for name, path in config.serve.bases.items():
        base = config.model.model_copy(update={"path": path, "init": "pretrained"})
        check_dtype(base, f"serve.bases.{name}")


def fit_memory(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with the keys that `training.memory=auto` chooses, and a line for each of them."""
    if config.training.memory != "auto" or config.resources.device != "cuda":
        return config, ()
    if not config.resources.gpu_memory:
        expected = "resources.gpu_memory to choose by"
        raise ConfigError("training.memory", "auto", expected, "set resources.gpu_memory, such as 80G")
    return choose_memory(config, run_sizes(config))


def run_sizes(config: RunConfig) -> Sizes:
    """The sizes of a run's policy and of the model that drafts its tokens."""
    return sizes_of_run(config, _model_sizes)


@cache
def _model_sizes(model: ModelConfig) -> Sizes:
    """The model's sizes, looked up once for all points of a sweep."""

    def count(model: ModelConfig) -> Sizes:
        sizes: Sizes = call_with_torch(_MODEL_SIZE, "sizes_of", model)
        return sizes

    return remembered_sizes(model, count)


@cache
def _check_context(model: ModelConfig, cp: int) -> None:
    """Raise `ConfigError` unless the model supports context parallelism; checked once for all points of a sweep."""
    check_context_heads(cp, head_count(model), key_heads(model))
    located = model.model_copy(update={"path": str(model_directory(model))})
    packs = call_with_torch("pipeline.train.model.packing_probe", "supports_packing", located, True)
    check_context_packing(located, cp, packs)


@cache
def _check_served_adapters(model: ModelConfig) -> None:
    """Once for all points of a sweep."""
    if not (model.lora.travels_alone and expert_count(model)):
        return
    call_with_torch(_MODEL_SIZE, "check_served_adapters", model)


@cache
def _check_experts(model: ModelConfig, ep: int) -> None:
    """Raise `ConfigError` unless the model supports expert parallelism; checked once for all points of a sweep."""
    call_with_torch(_MODEL_SIZE, "check_experts", model, ep)


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
    call_with_torch(_MODEL_SIZE, "check_routers", model)


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
    return make_executor(paths, config, plan, run_id, queue).batch_file()


def make_executor(paths: RunPaths, config: RunConfig, plan: Plan, run_id: str, queue: JobQueue) -> BatchExecutor:
    """The executor of a run's job on the queue of its scheduler."""
    scheduler = batch_scheduler(config.cluster.scheduler)
    return BatchExecutor(paths, config, plan, run_id=run_id, scheduler=scheduler, queue=queue)
