"""The tasks of evaluation sets, looked at before anything starts.

Owns the rule that what a set asks is there: its task, its held-out prompts, its reward functions. Promises that what is
wrong is told with the key of that set.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config import RewardConfig, RunConfig, TaskConfig
from pipeline.config.evaluation_keys import SETS
from pipeline.environments import load_task
from pipeline.environments.rewards import check_rewards
from pipeline.environments.user_imports import user_import_errors
from pipeline.errors import ConfigError


def check_eval_tasks(config: RunConfig) -> None:
    """`ConfigError` unless each set that has a task of its own can be asked."""
    for name, each in config.evaluation.sets.items():
        if each.task is not None:
            with _keys_below(f"{SETS}{name}."):
                check_held_out(each.task, each.reward, config.seed)


def check_held_out(wanted: TaskConfig, reward: RewardConfig, seed: int) -> None:
    """`ConfigError` unless a task has prompts to evaluate, and a reward for them."""
    task = load_task(wanted, seed)
    with user_import_errors("task.name", wanted.name, "a task with held-out prompts"):
        if len(task.held_out()) == 0:
            raise ConfigError("task.name", wanted.name, "a task with held-out prompts", "its held_out() is empty")
    check_rewards(reward, task, wanted.name)


@contextmanager
def _keys_below(prefix: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error.key}", error.value, error.expected, error.hint) from error
