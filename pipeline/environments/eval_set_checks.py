"""The tasks of evaluation sets, validated before anything starts.

Owns the rule that a set's task, held-out prompts and reward functions exist. Promises that an error names the key of
its set.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config import RewardConfig, RunConfig, TaskConfig
from pipeline.config.evaluation_keys import SETS
from pipeline.config.task_keys import MIX
from pipeline.environments import load_task
from pipeline.environments.rewards import check_rewards
from pipeline.environments.user_imports import user_import_errors
from pipeline.errors import ConfigError


def check_eval_tasks(config: RunConfig) -> None:
    """`ConfigError` unless each evaluation set with a separate task can be evaluated.

    A set must not have the label of a task of the run's mix, whose results are named `eval/<label>/accuracy` too.
    """
    for number, entry in enumerate(config.task.tasks):
        if config.task.name == MIX and entry.title in config.evaluation.sets:
            expected = "another label: an evaluation set has this name"
            hint = f"rename evaluation.sets.{entry.title}, or set another label"
            raise ConfigError(f"task.tasks.{number}.label", entry.title, expected, hint)
    for name, eval_set in config.evaluation.sets.items():
        if eval_set.task is not None:
            with _keys_below(f"{SETS}{name}."):
                check_held_out(eval_set.task, eval_set.reward, config.seed)


def check_held_out(task_config: TaskConfig, reward: RewardConfig, seed: int) -> None:
    """`ConfigError` unless a task has prompts to evaluate, and a reward for them."""
    task = load_task(task_config, seed)
    with user_import_errors("task.name", task_config.name, "a task with held-out prompts"):
        if len(task.held_out()) == 0:
            raise ConfigError("task.name", task_config.name, "a task with held-out prompts", "its held_out() is empty")
    check_rewards(reward, task, task_config.name)


@contextmanager
def _keys_below(prefix: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error.key}", error.value, error.expected, error.hint) from error
