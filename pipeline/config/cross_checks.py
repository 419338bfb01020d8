"""Rules between keys, and between a config and its model, that one value alone cannot violate.

A submission runs them once, before anything starts. Only the existence of directories is read from disk.
"""

from collections.abc import Callable
from pathlib import Path

import fsspec

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ClusterConfig
from pipeline.config.container_keys import check_container
from pipeline.config.debug_checks import debug_is_possible
from pipeline.config.evaluation_keys import check_sets
from pipeline.config.fault_checks import faults_can_happen
from pipeline.config.gpu_checks import servers_have_gpus, shared_gpus_have_room, trainer_processes_have_one_gpu
from pipeline.config.key_relevance import default_of, unread_keys, value_of
from pipeline.config.loss_checks import correction_has_old_logprobs, kl_has_a_gradient, only_groups_are_filtered
from pipeline.config.mesh_checks import (
    context_divides_a_replica,
    experts_divide_a_replica,
    replicas_divide_the_trainer,
)
from pipeline.config.optimizer_checks import optimizer_is_possible
from pipeline.config.teacher_checks import teacher_is_used, top_tokens_are_in_the_loss
from pipeline.errors import ConfigError
from pipeline.run.run_documents import LOCAL
from pipeline.utils.user_commands import user_command

_TOKEN_BYTES, _TAUGHT_BYTES, _LIKELY_BYTES = 10, 4, 8
"""Bytes of one token in a group's record: id, mask, log-probability and version; with a teacher, its log-probability;
and of each of the teacher's `top_k` likeliest tokens, id and log-probability (`pipeline.transport.sample_records`)."""

_SAMPLE_BYTES = 512
"""Upper bound of a sample's bytes in addition to its tokens."""

MAX_SERVER_SEED = (1 << 31) - 1
"""Server i has the seed of the run plus i."""

QUEUE_KEYS = tuple(
    key
    for key in ClusterConfig.model_fields
    if key != "kind" and (key == "notice_seconds" or not key.endswith("_seconds"))
)
"""The keys of `cluster` that have no effect on one machine."""


def check_run(config: RunConfig, positions: int | None = None) -> None:
    """Run `check_config`, and check that the run has a phase, servers with models and GPUs, and even mini-batches.

    Offline jobs (`training.jobs`) are checked by `pipeline.train.train_jobs.check_offline`.
    """
    _a_phase_is_configured(config)
    _servers_of_clients_have_models(config)
    if config.has_servers:
        servers_have_gpus(config)
    if config.has_rl:
        check_mini_batches(config, config.training.prompts_per_step, "training.prompts_per_step")
    check_config(config, positions)


def check_config(config: RunConfig, positions: int | None = None) -> None:
    """Raise `ConfigError` for the first violated rule. `positions` is the model's longest sequence, if known."""
    rollout_rules = _ROLLOUT_RULES if config.has_rollouts else _EVALUATION_RULES if config.evaluation.only else ()
    for rule in (*_RULES, *rollout_rules):
        rule(config)
    if positions is not None and config.model.max_length > positions:
        expected = f"at most {positions}, the model's max_position_embeddings"
        raise ConfigError("model.max_length", config.model.max_length, expected, f"set model.max_length={positions}")


def check_parallel(config: RunConfig, heads: int | None) -> None:
    """Raise `ConfigError` unless a server's GPUs divide the model's attention heads, if their number is known."""
    gpus = config.resources.inference.gpus
    if heads is not None and gpus > 1 and heads % gpus:
        expected = f"a divisor of {heads}, the model's num_attention_heads, which the GPUs of a server share evenly"
        raise ConfigError("resources.inference.gpus", gpus, expected, "change it")


def check_mini_batches(config: RunConfig, prompts: int, key: str) -> None:
    """Raise `ConfigError` unless `training.mini_batches` divides `prompts`, the prompts of a batch set by `key`."""
    parts = config.training.mini_batches
    if prompts % parts:
        expected = f"a divisor of {key} ({prompts}), since each takes whole prompts"
        raise ConfigError("training.mini_batches", parts, expected, "change one of the two")


def check_address(key: str, url: str, hint: str) -> None:
    """Raise `ConfigError` unless `url` is an absolute path, or a URL that fsspec can open from every node."""
    protocol, is_url, location = url.partition("://")
    if url.startswith("/"):
        return
    if not is_url or protocol == "memory":
        raise ConfigError(key, url, "a URL, or an absolute path, that all nodes see alike", hint)
    if not location.strip("/"):
        raise ConfigError(key, url, f"a bucket or a folder after {protocol}://", hint)
    try:
        fsspec.get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise ConfigError(key, url, "an address that fsspec can open", f"{error}; {hint}") from None


def _a_phase_is_configured(config: RunConfig) -> None:
    training = config.training
    if config.has_preference:
        _preferences_train_alone(config)
        return
    if config.replay and (not config.has_rl or training.jobs or config.evaluation.only):
        raise ConfigError("replay", config.replay, "nothing in a run without RL steps", "set training.steps")
    if config.serve.enabled and (training.jobs or config.has_sft):
        key, value = ("training.jobs", training.jobs) if training.jobs else ("training.sft", "set")
        raise ConfigError(key, value, "nothing with serve.enabled: clients choose the training", "leave it out")
    if training.jobs:
        sft = training.sft
        for key, steps in {"steps": training.steps, "sft.steps": sft.steps, "sft.epochs": sft.epochs}.items():
            if steps:
                expected = "0 with training.jobs: each job file sets its steps"
                raise ConfigError(f"training.{key}", steps, expected, "set it to 0, or leave training.jobs out")
    elif config.evaluation.only:
        if config.has_rl or config.has_sft or config.serve.enabled:
            raise ConfigError(
                "evaluation.only", True, "a run that does nothing else", f"use {user_command('evaluate')}"
            )
    elif not config.has_rl and not config.has_sft and not config.serve.enabled:
        hint = "set it, or training.sft.steps for SFT alone, or preference.epochs"
        raise ConfigError("training.steps", 0, "1 or more if training.sft.steps is 0 too", hint)


def _preferences_train_alone(config: RunConfig) -> None:
    """A run of preference training has pairs, one length, and no other phase."""
    preference, sft = config.preference, config.training.sft
    for key, value in {
        "training.steps": config.training.steps,
        "training.sft.steps": sft.steps,
        "training.sft.epochs": sft.epochs,
        "training.jobs": config.training.jobs,
        "replay": config.replay,
        "serve.enabled": config.serve.enabled,
        "evaluation.only": config.evaluation.only,
    }.items():
        if value:
            expected = f"{type(value)()!r} with preference training, which is a run by itself"
            raise ConfigError(key, value, expected, "use two runs: set model.path to the model/ of the first one")
    if preference.steps and preference.epochs:
        raise ConfigError("preference.epochs", preference.epochs, f"0 with {preference.steps} steps", "set one of them")
    if not config.data.path:
        hint = "set it to a file with the columns prompt, chosen and rejected (docs/preferences.md)"
        raise ConfigError("data.path", "", "a dataset of preference pairs", hint)
    if config.data.train_on != "all":
        expected = "all: each completion of a pair is trained whole"
        raise ConfigError("data.train_on", config.data.train_on, expected, "leave it out")
    if preference.formula.is_labeled and preference.batch < 2:
        expected = "2 or more with preference.loss=kto, whose KL needs completions of other prompts"
        raise ConfigError("preference.batch", preference.batch, expected, "raise it; the usual size is 32")
    if preference.formula.is_reward_model and config.model.lora.rank:
        expected = f"0 with preference.loss={preference.loss}: a reward model is trained whole"
        raise ConfigError("model.lora.rank", config.model.lora.rank, expected, "leave it out")


def _servers_of_clients_have_models(config: RunConfig) -> None:
    serve, inference = config.serve, config.resources.inference
    if serve.whole_servers and not (serve.sampling and serve.whole_models):
        expected = "0 without serve.sampling=true and serve.whole_models=true"
        raise ConfigError("serve.whole_servers", serve.whole_servers, expected, "set both, or leave it out")
    if serve.base_servers and not (serve.sampling and serve.bases):
        expected = "0 without serve.sampling=true and serve.bases"
        raise ConfigError("serve.base_servers", serve.base_servers, expected, "set both, or leave it out")
    reserved = serve.whole_servers + serve.base_servers * len(serve.bases)
    if reserved and reserved >= inference.nodes * inference.servers:
        expected = f"more than the {reserved} servers of serve.whole_servers and serve.base_servers"
        hint = "add servers: the rest sample from the run's base and its adapters"
        raise ConfigError("resources.inference.servers", inference.servers, expected, hint)
    for name in serve.bases:
        if name in (serve.base_name or Path(config.model.path).name, config.model.path):
            raise ConfigError("serve.bases", name, "another name than that of the run's base", "rename it")


def _epochs_are_of_data(config: RunConfig) -> None:
    start = config.training.sft
    if start.epochs and start.steps:
        raise ConfigError("training.sft.epochs", start.epochs, f"0 with {start.steps} steps", "set one of them")
    if start.epochs and not config.data.path:
        expected = f"a dataset, whose rows the epochs count ({start.epochs:g} training.sft.epochs)"
        raise ConfigError("data.path", "", expected, "set it, or training.sft.steps in place of epochs")


def _data_is_trained(config: RunConfig) -> None:
    data = config.data
    if data.path and not (config.has_sft or config.has_preference):
        hint = "set training.sft.epochs or preference.epochs, or for RL task.options.path"
        raise ConfigError("data.path", data.path, "nothing without SFT or preference training", hint)
    for key in ("eval_path", "eval_split", "eval_rows"):
        if getattr(data, key) and not data.path:
            raise ConfigError(f"data.{key}", getattr(data, key), "nothing without data.path", "set that too")


def _servers_make_a_quorum(config: RunConfig) -> None:
    inference = config.resources.inference
    if config.server_quorum > inference.nodes * inference.servers:
        expected = f"at most {inference.nodes * inference.servers}, the servers of resources.inference"
        raise ConfigError("inference.min_servers", config.inference.min_servers, expected, "lower it, or set all")


def check_queue_keys(config: RunConfig) -> None:
    """Raise `ConfigError` for a key of the queue in a job without one, and for keys of a container that contradict."""
    container = config.cluster.container
    check_container(container)
    if not config.cluster.on_this_machine:
        if config.cluster.max_jobs and (dependency := config.cluster.sbatch.get("dependency")):
            expected = "no other dependency with cluster.max_jobs, which makes each job wait for an earlier one"
            raise ConfigError("cluster.sbatch.dependency", dependency, expected, "set one of the two")
        return
    if container.is_used:
        expected = "none on one machine, where the agents run in the launcher's environment"
        hint = "set cluster=slurm, or start the launcher itself in the container"
        raise ConfigError("cluster.container.kind", container.kind, expected, hint)
    plain = ClusterConfig(scheduler=LOCAL)
    for key in QUEUE_KEYS:
        value = getattr(config.cluster, key)
        if value != getattr(plain, key):
            raise ConfigError(f"cluster.{key}", value, "nothing, on one machine", "set cluster=slurm, or leave it out")
    if config.resources.hetjob:
        raise ConfigError("resources.hetjob", True, "false, on one machine", "set cluster=slurm, or leave it out")


def _hetjob_needs_aux_nodes(config: RunConfig) -> None:
    if config.resources.hetjob and not config.has_rollouts:
        expected = "one with training.steps=0: the trainer is the only role"
        raise ConfigError("resources.hetjob", True, expected, "leave it out")
    if config.resources.hetjob and not config.resources.services.nodes:
        expected = "1 with resources.hetjob=true, whose first component they are"
        raise ConfigError("resources.services.nodes", 0, expected, "set it, or resources.hetjob=false")


def _changed_keys_are_read(config: RunConfig) -> None:
    for key, value, reader in unread_keys(config):
        setting = f"{reader.key}={value_of(config, reader.key)}"
        expected = f"its default ({default_of(key)!r}), since {setting} does not read it"
        raise ConfigError(key, value, expected, f"set that or leave it out, or set {reader}")


def _servers_take_the_seed(config: RunConfig) -> None:
    if config.has_servers and config.seed > MAX_SERVER_SEED:
        expected = f"at most {MAX_SERVER_SEED} in a run with servers, which take 32 bits"
        raise ConfigError("seed", config.seed, expected, "choose a smaller one")


def _adapters_are_there(config: RunConfig) -> None:
    lora = config.model.lora
    if lora.merge and lora.adapter and config.evaluation.only:
        raise ConfigError(
            "model.lora.merge", True, "false to evaluate an adapter, which only a trainer merges", "remove it"
        )
    if lora.adapter and not Path(lora.adapter).is_dir():
        raise ConfigError(
            "model.lora.adapter", lora.adapter, "the directory of an adapter", "there is none; fix the path"
        )


def _rewards_have_functions(config: RunConfig) -> None:
    functions, weights = config.reward.functions, config.reward.weights
    if weights and len(weights) != len(functions):
        expected = f"one for each of reward.functions ({len(functions)})"
        raise ConfigError("reward.weights", list(weights), expected, "leave it out: then each counts 1")
    if config.reward.calls == "group" and not functions:
        expected = "sample, since reward.functions is empty"
        raise ConfigError("reward.calls", "group", expected, "leave it out, or name functions")
    duplicates = [name for name in functions if functions.count(name) > 1]
    if duplicates:
        raise ConfigError("reward.functions", list(functions), "each function once", f"{duplicates[0]} is there twice")


def _groups_can_succeed(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.min_samples > rollout.group_size:
        expected = f"at most rollout.group_size ({rollout.group_size})"
        raise ConfigError("rollout.min_samples", rollout.min_samples, expected, "lower min_samples or raise group_size")


def _turns_leave_room_for_prompts(config: RunConfig) -> None:
    most, length = config.rollout.max_tokens, config.model.max_length
    if most >= length:
        expected = f"less than model.max_length ({length}), which holds the prompt too"
        raise ConfigError("rollout.max_tokens", most, expected, "lower it or raise model.max_length")


def _samples_fit_micro_batches(config: RunConfig) -> None:
    training, length = config.training, config.model.max_length
    if training.micro_batch_budget < length:
        least, cp = -(-length // training.mesh.cp), training.mesh.cp
        longest = f"model.max_length ({length})" + (f" / training.mesh.cp ({cp})" if cp > 1 else "")
        expected = f"at least {longest}, so that every sample fits"
        hint = f"raise it to {least} or lower model.max_length"
        raise ConfigError("training.micro_batch_tokens", training.micro_batch_tokens, expected, hint)


def _eval_sets_have_servers(config: RunConfig) -> None:
    if config.evaluation.command and not config.evaluation.only:
        expected = "nothing in a run that trains, whose servers accept tokens only"
        raise ConfigError(
            "evaluation.command", config.evaluation.command[0], expected, f"use {user_command('evaluate')}"
        )
    check_sets(config.evaluation, config.model.max_length, config.rollout.max_tokens)


def _stale_mask_needs_a_lag(config: RunConfig) -> None:
    if config.training.stale == "mask" and not config.training.max_lag:
        expected = "refuse with training.max_lag=0, where no token is stale"
        raise ConfigError("training.stale", "mask", expected, "leave it out, or raise training.max_lag")


def _groups_fit_streams(config: RunConfig) -> None:
    check_stream_budget(config)


def check_stream_budget(config: RunConfig, routed_bytes: int = 0) -> None:
    """Raise `ConfigError` unless a stream holds two groups of the longest samples. Routed experts add `routed_bytes` to
    each token."""
    taught = _TAUGHT_BYTES + _LIKELY_BYTES * config.teacher.top_k if config.teacher.url else 0
    token = _TOKEN_BYTES + taught + routed_bytes
    sample = config.model.max_length * token + _SAMPLE_BYTES
    least = 2 * config.rollout.group_size * sample
    if config.streams.budget_bytes < least:
        records = f" with {routed_bytes} bytes of experts each" if routed_bytes else ""
        tokens = f"rollout.group_size × model.max_length tokens{records}"
        expected = f"at least {least}, two of the largest groups ({tokens})"
        raise ConfigError("streams.budget_bytes", config.streams.budget_bytes, expected, "raise it")


def _checkpoint_url_can_be_opened(config: RunConfig) -> None:
    hint = "see docs/checkpoints.md, or leave it empty: then they are in the run directory"
    if config.training.checkpoints:
        check_address("training.checkpoints", config.training.checkpoints, hint)


_RULES: tuple[Callable[[RunConfig], None], ...] = (
    faults_can_happen,
    trainer_processes_have_one_gpu,
    replicas_divide_the_trainer,
    context_divides_a_replica,
    experts_divide_a_replica,
    shared_gpus_have_room,
    check_queue_keys,
    _hetjob_needs_aux_nodes,
    _changed_keys_are_read,
    _servers_take_the_seed,
    correction_has_old_logprobs,
    kl_has_a_gradient,
    teacher_is_used,
    top_tokens_are_in_the_loss,
    only_groups_are_filtered,
    _adapters_are_there,
    _rewards_have_functions,
    _samples_fit_micro_batches,
    _checkpoint_url_can_be_opened,
    debug_is_possible,
    _epochs_are_of_data,
    _data_is_trained,
    optimizer_is_possible,
)

_EVALUATION_RULES: tuple[Callable[[RunConfig], None], ...] = (_turns_leave_room_for_prompts, _eval_sets_have_servers)
"""Rules of runs that sample, for training or for evaluation."""

_ROLLOUT_RULES = (
    _servers_make_a_quorum,
    _groups_can_succeed,
    _stale_mask_needs_a_lag,
    _groups_fit_streams,
    *_EVALUATION_RULES,
)
"""Rules of runs that train on samples."""
