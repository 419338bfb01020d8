"""One default for each key: that of the schema. A file in `conf/` sets only the keys that make up its option.

A default that `conf/` states again could differ from the schema's, and `LossConfig(name="grpo")` would be another
algorithm than `loss=grpo`. An experiment may state a default again: a recipe stays as it is when a default changes.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipeline.config import RunConfig, known_keys, load_config
from pipeline.config.run_identity import flatten
from slurm.submission.compose_config import CONF, compose_config, config_groups
from tests.fakes.configs import make_config

REQUIRED = {key for key, field in known_keys().items() if field.is_required()}
"""The keys without a default in the schema: a group's option, an experiment or the user chooses them."""

MODEL = ("model.path", "model.init", "model.dtype", "model.max_length")
TINY = ("model.path", "model.max_length")
"""A model's files, the type that it was trained in, and its longest sample."""
LAYOUT = (
    *("resources.trainer.nodes", "resources.trainer.processes", "resources.trainer.threads", "resources.trainer.gpus"),
    *("resources.inference.nodes", "resources.inference.servers", "resources.inference.threads"),
    *("resources.inference.gpus", "resources.services.nodes", "resources.gpus_per_node", "resources.device"),
)
"""The roles' nodes and devices. A layout is read as a whole, so its file may state defaults again."""
SHARED = (*LAYOUT, "resources.colocate", "inference.gpu_memory")
SHARED_AT_ONCE = (
    *(*SHARED, "resources.mps", "resources.inference.servers_per_gpu"),
    "training.micro_batch_tokens",  # the host takes longer for two micro-batches of a small model than for a large one
)
RECIPE = (
    *("name", "task.options", "model.max_length", "optim.lr"),
    *("training.steps", "training.prompts_per_step", "training.max_lag"),
    *("training.zero_variance_groups", "training.mask_truncated"),
    *("training.eval_every", "training.checkpoint_every"),
    *("training.sft.steps", "training.sft.batch", "training.sft.lr"),
    *("rollout.group_size", "rollout.max_tokens", "rollout.concurrency"),
)
"""The size of an experiment."""
PREFERENCES = [*("preference.epochs", "preference.batch", "preference.lr"), *RECIPE, "data.path", "data.eval_rows"]
"""The size of an experiment with preference pairs, and the pairs."""

OWN_KEYS: Mapping[str, Mapping[str, Iterable[str]]] = {
    "cluster": {
        "local": ["cluster.scheduler"],
        # Nodes start at different times, and Slurm kills a preempted job after KillWait.
        "slurm": ["cluster.scheduler", "cluster.rendezvous_seconds", "cluster.grace_seconds"],
    },
    "loss": {
        "cispo": ["loss.name", "loss.clip_low", "loss.clip_high", "loss.old_logprobs", "loss.tis"],
        "dapo": ["loss.name", "loss.clip_high", "training.zero_variance_groups", "training.overlong_buffer"],
        "dr_grpo": ["loss.name", "loss.advantage_estimator", "loss.normalize"],
        "dro": ["loss.name", "loss.advantage_estimator", "loss.old_logprobs", "loss.tis"],
        "grpo": ["loss.name"],
        "gspo": ["loss.name", "loss.normalize", "loss.clip_low", "loss.clip_high"],
        "ppo": ["loss.name", "loss.advantage_estimator"],
        "reinforce": ["loss.name", "loss.old_logprobs", "loss.tis"],
        "reinforce_pp": ["loss.name", "loss.advantage_estimator", "loss.kl", "loss.kl_in", "loss.kl_estimator"],
        "rloo": ["loss.name", "loss.advantage_estimator", "loss.normalize"],
    },
    "model": {"*": MODEL, "tiny_qwen3": TINY, "tiny_text": TINY},
    "resources": {"*": LAYOUT, "one_gpu": SHARED, "one_gpu_mps": SHARED_AT_ONCE, "machine": SHARED},
    "task": {
        "*": ["task.name"],
        "agent": ["task.name", "task.processes"],  # an agent waits for the policy most of the time
        "code": ["task.name", "task.seconds"],
        "math": ["task.name", "task.options", "task.seconds", "reward.functions"],
    },
    "tracking": {"*": ["tracking.trackers"]},
    "training": {
        "large": [
            *("training.reshard_after_forward", "training.activation_checkpointing", "training.compile"),
            *("training.staging_device", "inference.staging_device"),
        ],
    },
    "experiment": {
        "*": RECIPE,
        "agent_guess": [*RECIPE, "task.processes", "data.path"],
        "distillation": [
            *(*RECIPE, "loss.advantage_estimator", "loss.kl", "loss.kl_in", "loss.kl_estimator", "loss.gamma"),
            "reward.functions",
        ],
        "dpo": PREFERENCES,
        "grpo": [*RECIPE, "training.memory", "training.checkpoint_seconds"],
        "harbor": [*RECIPE, "task.processes"],
        "mix": [*RECIPE, "task.tasks"],
        "openenv": [*RECIPE, "task.processes"],
        "reward_model": [*PREFERENCES, "preference.loss"],
        "rlhf": [*RECIPE, "data.path", "data.columns.completion", "reward.model.path", "reward.model.threads"],
        "sft": [*RECIPE, "optim.schedule", "optim.warmup_steps", "training.sft.epochs"],
        "smollm2": [*RECIPE, "training.compile"],
        "tinker": [*RECIPE, "serve.enabled"],
    },
}
"""The keys that each option of a group sets on purpose; `*` is for the options that are not listed."""

MAY_STATE_DEFAULTS = ("resources", "experiment")
DEFAULT_BY_NAME = ("tracking", "wandb")
"""The option of the default tracker, so that it can be chosen by its name as the others."""
OPTIONS = [(group, option) for group, options in config_groups().items() for option in options]
STATES_NO_DEFAULT = [case for case in OPTIONS if case[0] not in MAY_STATE_DEFAULTS and case != DEFAULT_BY_NAME]


def own_keys(group: str, option: str) -> set[str]:
    options = OWN_KEYS[group]
    return set(options.get(option, options.get("*", ())))


def values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each key of the schema; those below a mapping of options are one value."""
    result: dict[str, Any] = {}
    for key, value in flatten(dict(tree)).items():
        mapping = next((name for name in ("task.options", "reward.options") if key.startswith(f"{name}.")), None)
        if mapping:
            result.setdefault(mapping, {})[key] = value
        else:
            result[key] = value
    return result


def in_file(group: str, option: str) -> set[str]:
    """The keys that an option's file sets."""
    path = CONF / group / f"{option}.yaml"
    tree = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(tree, dict)
    tree.pop("defaults", None)
    is_global = path.read_text().startswith("# @package _global_")
    return set(values(tree if is_global else {group: tree}))


def changed(config: RunConfig) -> set[str]:
    """The keys with another value than the schema's default."""
    own = json.loads(config.model_dump_json())
    required = {
        "name": own["name"],
        "cluster": {"scheduler": own["cluster"]["scheduler"]},
        "model": {"path": own["model"]["path"]},
        "task": {"name": own["task"]["name"]},
        "loss": {"name": own["loss"]["name"]},
    }
    default, mine = values(load_config(required).model_dump(mode="json")), values(own)
    return {key for key in default.keys() | mine.keys() if default.get(key) != mine.get(key)}


def test_every_listed_option_exists() -> None:
    assert set(OWN_KEYS) == set(config_groups())
    for group, options in OWN_KEYS.items():
        assert set(options) - {"*"} <= set(config_groups()[group])
        assert {key for keys in options.values() for key in keys} <= set(known_keys())


def test_without_a_choice_every_key_but_the_model_s_length_has_the_schema_s_default() -> None:
    assert changed(compose_config(["name=test"])) == {"model.max_length"}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_sets_its_own_keys_and_nothing_by_accident(group: str, option: str) -> None:
    assert in_file(group, option) <= own_keys(group, option)


@pytest.mark.parametrize(("group", "option"), STATES_NO_DEFAULT)
def test_an_option_states_no_default_again(group: str, option: str) -> None:
    config = compose_config(["name=test", f"{group}={option}"])
    assert changed(config) - {"model.max_length"} == own_keys(group, option) - REQUIRED - {"model.max_length"}
    assert in_file(group, option) == own_keys(group, option)


@pytest.mark.parametrize("experiment", config_groups()["experiment"])
def test_an_experiment_changes_only_what_it_and_its_groups_own(experiment: str) -> None:
    chosen = {key for keys in OWN_KEYS["loss"].values() for key in keys}
    for group in ("model", "task", "resources"):
        chosen |= {key for keys in OWN_KEYS[group].values() for key in keys}
    assert changed(compose_config([f"experiment={experiment}"])) <= own_keys("experiment", experiment) | chosen


def test_the_tests_factory_has_the_schema_s_defaults_except_for_its_size() -> None:
    assert changed(make_config()) == {"training.steps", "training.prompts_per_step"}
