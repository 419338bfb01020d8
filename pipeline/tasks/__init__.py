"""Tasks: what is learned.

Owns the protocol (`protocol`, `episode`), the model's view of text (`template`, `chat`), the processes in which prompts
and rewards are made (`calls`, `worker`, `pool`), the built-in tasks, and the way from a name in the config to a task:
`load_task`. Promises that a wrong name or option, and a task that breaks while it is
loaded, is a `ConfigError` that names the key. Loading a task imports neither torch nor transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

from pydantic import ValidationError

from pipeline.config import RunConfig, TaskConfig, nearest
from pipeline.errors import ConfigError, one_line
from pipeline.tasks.episode import Episode, Turn
from pipeline.tasks.protocol import Demonstration, Message, Policy, Prompt, Task, TaskOptions, ask

__all__ = [
    "Demonstration",
    "Episode",
    "Message",
    "Policy",
    "Prompt",
    "Task",
    "TaskOptions",
    "Turn",
    "ask",
    "check_task",
    "load_task",
]

BUILT_IN = {"arithmetic": "pipeline.tasks.arithmetic:Arithmetic"}


def load_task(config: TaskConfig, seed: int) -> Task:
    """The task that the config names, with its options checked; `ConfigError` for anything that keeps it from that."""
    kind = _task_class(config.name)
    with _users_code(config.name, "a task that can be made"):
        try:
            options = kind.Options.model_validate(config.options)
        except ValidationError as error:
            raise _option_error(error, kind.Options) from None
        return kind(options, seed)


def check_task(task: Task, config: RunConfig) -> None:
    """`ConfigError` unless the config's task has what its run needs: for RL prompts to train and prompts to evaluate,
    for SFT demonstrations."""
    name, sft_steps = config.task.name, config.training.warm_start.steps
    if config.has_rollouts:
        with _users_code(name, "a task with prompts and held-out prompts"):
            if len(task) == 0:
                raise ConfigError("task.name", name, "a task with training prompts", "its __len__ is 0")
            if len(task.held_out()) == 0:
                raise ConfigError("task.name", name, "a task with held-out prompts", "its held_out() is empty")
    if sft_steps:
        _check_demonstrations(task, name, sft_steps)


def _check_demonstrations(task: Task, name: str, steps: int) -> None:
    with _users_code(name, "a task whose demonstration(0) works, for the warm start"):
        try:
            task.demonstration(0)
        except NotImplementedError:
            expected = f"0, since the task {name} has no demonstrations"
            raise ConfigError("training.warm_start.steps", steps, expected, "set it to 0, or write some") from None


@contextmanager
def _users_code(name: str, expected: str) -> Iterator[None]:
    """Translates whatever the code of the task `name` raises into a `ConfigError` that says where it happened."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        what = one_line(error)
        mend = f"{what} ({Path(place.filename).name}, line {place.lineno})"
        raise ConfigError("task.name", name, expected, mend) from error


def _task_class(name: str) -> type[Task]:
    expected = "a built-in task, or package.module:Class"
    module, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not colon:
        raise ConfigError("task.name", name, expected, nearest(name, list(BUILT_IN)))
    with _users_code(name, "a module that can be imported"):
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError("task.name", name, expected, f"{error}; is its folder in PYTHONPATH?") from None
    kind: Any = getattr(loaded, attribute, None)
    if kind is None:
        raise ConfigError("task.name", name, expected, f"{module} ({loaded.__file__}) has no {attribute}")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigError("task.name", name, "a subclass of pipeline.tasks.Task", "see pipeline/tasks/protocol.py")
    return kind


def _option_error(error: ValidationError, options: type[TaskOptions]) -> ConfigError:
    details = error.errors()[0]
    place = ".".join(str(part) for part in details["loc"])
    key = f"task.options.{place}" if place else "task.options"
    if details["type"] == "extra_forbidden":
        known = list(options.model_fields)
        mend = nearest(place, known) if known else "this task has no options; ~task.options removes them"
        return ConfigError(key, details["input"], "a known option", mend)
    expected = details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    field = options.model_fields.get(str(details["loc"][0])) if details["loc"] else None
    return ConfigError(key, details["input"], expected, (field.description or "") if field else "")
