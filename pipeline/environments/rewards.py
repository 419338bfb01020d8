"""The reward of a run: the task's own, or a weighted sum of functions and a reward model.

Owns the meaning of `reward.functions`: loading and inspecting the functions, and combining their scores into one
reward. Promises that a function which cannot be called with the run's prompts is a `ConfigError` before anything
starts, and that a sample for which one function failed has no reward, only the reason. Loads neither torch nor
transformers, unless a function does.

    r = Σ weight · score, over the functions that score the sample, and the reward model
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config import RewardConfig, closest_match
from pipeline.environments.reward_functions import TRL, VERL, PartialScore, RewardFunction, columns_of
from pipeline.environments.reward_model import check_reward_model
from pipeline.environments.task_protocol import Prompt, Task
from pipeline.environments.user_imports import import_object, user_import_errors
from pipeline.errors import ConfigError
from pipeline.utils.value_bounds import MAX_REWARD

TASK = "task"
"""Name of the task's own reward among the functions."""
REWARD_MODEL = "reward_model"
"""Name of the reward model's score among the functions."""
KEY = "reward.functions"
_STYLES_TEXT = (
    "a function of (prompts, completions, **columns) or (data_source, solution_str, ground_truth, extra_info)"
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY = inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True)
class Score:
    """The reward of a sample, and its components by their names in metrics."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Mixture:
    """The parts of a config's reward by name and weight, without importing functions.

    Attributes:
        names: of the functions in order, then of the reward model.
        whole_groups: whether one call of a function has all samples of a prompt.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.names = names_of(part_specs(config))
        self.whole_groups = config.calls == "group"
        self._alone = not config.reads_conversations
        model_weight = (config.model.weight,) if config.model.path else ()
        functions = len(self.names) - len(model_weight)
        self._weights = (*(config.weights or (1.0,) * functions), *model_weight)

    def is_model(self, which: int) -> bool:
        """Whether part number `which` is the reward model."""
        return self.names[which] == REWARD_MODEL

    def title(self, which: int) -> str:
        """The name of function number `which` in a reason."""
        return "reward" if self._alone else f"reward {self.names[which]}"

    def combine(self, parts: Sequence[PartialScore | str]) -> Score | str:
        """The reward of a sample from the functions' scores, in order; or the reason why there is none."""
        score, metrics = 0.0, {}
        scored = False
        for name, weight, part in zip(self.names, self._weights, parts, strict=True):
            if isinstance(part, str):
                return part
            if part.score is not None:
                scored = True
                score += weight * part.score
                metrics[f"rewards/{name}"] = part.score
            metrics |= {f"rewards/{name}/{also}": value for also, value in part.metrics.items()}
        if not scored:
            return "no reward function has a score: each gave None"
        if not abs(score) <= MAX_REWARD:
            return f"reward is too large: {score:g}, beyond ±{MAX_REWARD:.0f}"
        return Score(score, {} if self._alone else metrics)


def part_specs(config: RewardConfig) -> tuple[str, ...]:
    """The functions in order, then the reward model if there is one; without any of them the task's own reward."""
    model = (REWARD_MODEL,) if config.model.path else ()
    return (*config.functions, *model) or (TASK,)


def names_of(specs: Sequence[str]) -> list[str]:
    """The names of functions in metrics and reasons: the bare name, with the module if two names are equal.

    >>> names_of(["a.b:right", "a.c:right", "a.c:short", "task"])
    ['a.b.right', 'a.c.right', 'short', 'task']
    """
    short = [spec.rpartition(":")[2] for spec in specs]
    return [name if short.count(name) == 1 else spec.replace(":", ".") for name, spec in zip(short, specs, strict=True)]


def load_rewards(config: RewardConfig, task: Task) -> list[RewardFunction | None]:
    """The functions in order, None for the task's own reward; `ConfigError` for an unusable one."""
    specs, names = part_specs(config), names_of(part_specs(config))
    for name in config.options:
        if name not in names or name in (TASK, REWARD_MODEL):
            expected = "the name of a function of reward.functions"
            raise ConfigError(f"reward.options.{name}", config.options[name], expected, closest_match(name, names))
    return [
        None if spec == TASK else _load(spec, name, config.options.get(name, {}), task)
        for spec, name in zip(specs, names, strict=True)
        if spec != REWARD_MODEL
    ]


def check_rewards(config: RewardConfig, task: Task, task_name: str) -> None:
    """`ConfigError` unless every function can be called with the columns of the task's prompts, and the reward model
    can be loaded."""
    check_reward_model(config.model)
    functions = load_rewards(config, task)
    if None in functions and not task.has_reward:
        expected = f"at least one function, and not `{TASK}`: the task {task_name} has no reward"
        hint = "reward.functions=[package.module:function], see docs/rewards.md"
        raise ConfigError(KEY, list(config.functions), expected, hint)
    with user_import_errors("task.name", task_name, "a task whose prompt(0) works"):
        prompts = task.first_prompts()
    for spec, function in zip(config.functions, functions, strict=False):
        for prompt in prompts:
            if function is not None:
                _check_columns(spec, function, prompt)


def _load(spec: str, name: str, options: Mapping[str, Any], task: Task) -> RewardFunction:
    call = import_object(
        KEY, spec, f"`{TASK}`, or package.module:function", "name its module, such as my_rewards:correct"
    )
    if not callable(call):
        raise ConfigError(KEY, spec, _STYLES_TEXT, f"it is no function: {type(call).__name__}")
    with user_import_errors(KEY, spec, _STYLES_TEXT):
        parameters = inspect.signature(call).parameters
    named = {name for name, parameter in parameters.items() if parameter.kind in _NAMED}
    takes = None if any(parameter.kind is _ANY for parameter in parameters.values()) else frozenset(named)
    style = _style(spec, call, parameters, named, takes)
    for option, value in options.items():
        passed = TRL if style == "trl" else VERL
        if option in passed or (takes is not None and option not in takes):
            expected = f"a keyword that {name} takes and that Rollcall does not pass"
            raise ConfigError(f"reward.options.{name}.{option}", value, expected, f"it takes {_listed(named)}")
    return RewardFunction(name, call, style, takes, dict(options), task.name)


def _style(
    spec: str,
    call: Any,
    parameters: Mapping[str, inspect.Parameter],
    named: set[str],
    takes: frozenset[str] | None,
) -> Literal["trl", "verl"]:
    nameless = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.POSITIONAL_ONLY]
    if inspect.isclass(call) or inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ConfigError(KEY, spec, _STYLES_TEXT, "it is a class or a generator; write a function that returns")
    if not nameless and "solution_str" in named:
        return "verl"
    if not nameless and ("completions" in named or (takes is None and not named)):
        return "trl"
    raise ConfigError(KEY, spec, _STYLES_TEXT, f"it takes ({', '.join(parameters)})")


def _check_columns(spec: str, function: RewardFunction, prompt: Prompt) -> None:
    """`ConfigError` when a function requires an argument that no one passes."""
    columns = columns_of(prompt)
    available = {*VERL} if function.style == "verl" else {*TRL, *columns}
    parameters = inspect.signature(function.call).parameters.values()
    needed = {one.name for one in parameters if one.kind in _NAMED and one.default is inspect.Parameter.empty}
    missing = sorted(needed - available - function.options.keys())
    if missing:
        hint = f"it needs {', '.join(missing)}; give it in reward.options.{function.name}, or rename a column"
        expected = f"a function of what prompts have: {_listed(available)}"
        raise ConfigError(KEY, spec, expected, hint)
    truth = {"ground_truth", "reward_model", "answer"}
    if function.style == "verl" and not truth & columns.keys():
        expected = "prompts with a column ground_truth, reward_model or answer"
        raise ConfigError(KEY, spec, expected, f"they have {_listed(columns)}")


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"
