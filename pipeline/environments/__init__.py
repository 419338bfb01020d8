"""Tasks: the prompts, episodes and rewards that a run trains on.

| module | owns |
|---|---|
| `task_protocol`, `episode` | the interface of a task, and an episode of several turns |
| `chat_template`, `chat_tokenizer`, `assistant_masks` | text as the model sees it; which tokens are trained |
| `task_calls`, `task_worker`, `worker_pool`, `worker_process` | the processes that make prompts and rewards |
| `user_imports`, `frozen_code`, `guarded_call` | code of the user |
| `sandbox`, `sandbox_kinds`, `sandbox_jail`, `sandbox_guard` | code of the policy, isolated |
| `rewards`, `reward_functions`, `llm_judge`, `math_verifier`, `last_number`, `zero_reward` | the reward of an answer |
| `reward_model`, `reward_model_queue`, `reward_model_process` | a trained reward model as a reward |
| `tool_task`, `tool_call_syntax` | episodes with tools; the syntax in which a policy writes tool calls |
| `arithmetic`, `chain_sum`, `countdown`, `dataset_task`, `reasoning_gym_task`, `code_task` | built-in tasks |
| `agent_task`, `agent_report` | episodes that an external agent runs, and the reward that it reports |
| `games/` | multi-turn games of the libraries Gymnasium, TextArena and OpenEnv |
| `harbor/` | tasks in the format of Harbor: an instruction, a shell, tests |
| `verifiers/` | environments of the library verifiers |
| `mix_task` | several tasks in one run, with weights |
| `eval_set_checks` | the tasks of evaluation sets |

`load_task` makes a task from its name in the config. Promises a `ConfigError` that names the key for a wrong name, a
wrong option, and a task that fails while it is loaded. Loading a task imports neither torch nor transformers.
"""

from pydantic import ValidationError

from pipeline.config import RunConfig, TaskConfig, closest_match
from pipeline.config.task_keys import MIX
from pipeline.config.validation import expected_value
from pipeline.data.chat_messages import Message
from pipeline.environments.episode import Episode, Turn
from pipeline.environments.mix_task import load_mix
from pipeline.environments.sandbox import refuse_none, require_sandbox
from pipeline.environments.task_protocol import (
    Completion,
    Demonstration,
    Policy,
    Prompt,
    Task,
    TaskOptions,
    user_prompt,
)
from pipeline.environments.user_imports import import_object, user_import_errors
from pipeline.errors import ConfigError

__all__ = [
    "Completion",
    "Demonstration",
    "Episode",
    "Message",
    "Policy",
    "Prompt",
    "Task",
    "TaskOptions",
    "Turn",
    "check_demonstrations",
    "check_sandbox",
    "check_task",
    "load_task",
    "user_prompt",
]

BUILT_IN = {
    "agent": "pipeline.environments.agent_task:AgentTask",
    "arithmetic": "pipeline.environments.arithmetic:Arithmetic",
    "chain_sum": "pipeline.environments.chain_sum:ChainSum",
    "code": "pipeline.environments.code_task:Code",
    "countdown": "pipeline.environments.countdown:Countdown",
    "dataset": "pipeline.environments.dataset_task:Dataset",
    "gymnasium": "pipeline.environments.games.gymnasium_task:GymnasiumTask",
    "harbor": "pipeline.environments.harbor.harbor_task:Harbor",
    "mix": "pipeline.environments.mix_task:Mix",
    "openenv": "pipeline.environments.games.openenv_task:OpenEnvTask",
    "reasoning_gym": "pipeline.environments.reasoning_gym_task:ReasoningGym",
    "textarena": "pipeline.environments.games.textarena_task:TextArenaTask",
    "tools": "pipeline.environments.tool_task:Tools",
    "verifiers": "pipeline.environments.verifiers.verifiers_task:Verifiers",
}


def load_task(config: TaskConfig, seed: int) -> Task:
    """Make the task that the config names, with validated options. Any failure is a `ConfigError`."""
    if config.name == MIX:
        return load_mix(config, seed, load_task)
    if config.tasks:
        names = [entry.title for entry in config.tasks]
        raise ConfigError("task.tasks", names, "nothing unless task.name=mix", "set task.name=mix, or leave it out")
    kind = _task_class(config.name)
    with user_import_errors("task.name", config.name, "a task that can be made"):
        try:
            options = kind.Options.model_validate(config.options)
        except ValidationError as error:
            raise _option_error(error, kind.Options) from None
        return kind(options, seed)


def check_sandbox(task: Task, config: TaskConfig) -> None:
    """`ConfigError` if the task runs code written by the policy and this machine cannot isolate it as configured."""
    if task.runs_code:
        require_sandbox(config.sandbox, suggests_none=not task.needs_sandbox)


def check_task(task: Task, config: RunConfig) -> None:
    """`ConfigError` unless the config's task has all that its run needs.

    RL needs prompts to train and prompts to evaluate. SFT without a dataset needs demonstrations.
    """
    name, sft_steps = config.task.name, config.training.sft.steps
    if config.has_rollouts:
        with user_import_errors("task.name", name, "a task with prompts and held-out prompts"):
            if len(task) == 0:
                raise ConfigError("task.name", name, "a task with training prompts", "its __len__ is 0")
            if task.needs_sandbox:
                refuse_none(config.task.sandbox)
            if config.cluster.on_this_machine:
                check_sandbox(task, config.task)
            if len(task.held_out()) == 0:
                raise ConfigError("task.name", name, "a task with held-out prompts", "its held_out() is empty")
    if sft_steps and not config.data.path:
        check_demonstrations(task, name, "training.sft.steps", sft_steps)


def check_demonstrations(task: Task, name: str, key: str, value: object = "demonstrations") -> None:
    """`ConfigError` unless task `name` has demonstrations, which `value` of `key` requires."""
    with user_import_errors("task.name", name, "a task whose demonstration(0) works, for SFT"):
        try:
            task.demonstration(0)
        except NotImplementedError:
            expected = f"{'0' if isinstance(value, int) else 'packed'}, since the task {name} has no demonstrations"
            raise ConfigError(key, value, expected, "change it, write some, or set data.path") from None


def _task_class(name: str) -> type[Task]:
    expected = "a built-in task, or package.module:Class"
    kind = import_object("task.name", BUILT_IN.get(name, name), expected, closest_match(name, list(BUILT_IN)))
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigError(
            "task.name", name, "a subclass of pipeline.environments.Task", "see pipeline/environments/task_protocol.py"
        )
    return kind


def _option_error(error: ValidationError, options: type[TaskOptions]) -> ConfigError:
    details = error.errors()[0]
    option = ".".join(str(part) for part in details["loc"])
    key = f"task.options.{option}" if option else "task.options"
    if details["type"] == "extra_forbidden":
        known = list(options.model_fields)
        hint = closest_match(option, known) if known else "this task has no options; ~task.options removes them"
        return ConfigError(key, details["input"], "a known option", hint)
    field = options.model_fields.get(str(details["loc"][0])) if details["loc"] else None
    return ConfigError(key, details["input"], expected_value(details), (field.description or "") if field else "")
