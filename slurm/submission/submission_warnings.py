"""Warnings about a run with a valid config, printed before it starts.

Owns the checks of things outside the config: the model's chat template, programs, services and the cores of this
machine. Promises an error only if the run cannot work, else one warning line for each problem, with its key. Waits at
most `ANSWER_SECONDS` for a service.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from jinja2 import TemplateError

from pipeline.checkpoints.run_progress import has_begun
from pipeline.config import RewardConfig, RunConfig, TaskConfig
from pipeline.config.dtype_checks import has_unstable_gradients
from pipeline.config.key_relevance import default_of, value_of
from pipeline.config.model_directory import (
    is_built_in,
    longest_sequence,
    model_directory,
    model_family,
    stored_dtype,
)
from pipeline.data.chat_messages import Message
from pipeline.data.examples import RowError
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.errors import ConfigError
from pipeline.inference.engine_registry import find_engine
from pipeline.run.paths import RunPaths
from pipeline.train.batching.conversation_rows import CHECKED_ROWS, train_eval_split
from slurm.registry.code_snapshot import changed_files

ANSWER_SECONDS = 3.0
MAX_CPU_LOAD = 2
"""Compute threads per core; more than this cause a warning."""
MANY_WORKERS = 8
"""Task processes per core; more than this cause a warning. They mostly wait."""
JUDGE = "pipeline.environments.llm_judge:judge"
TINY_MODEL = (64, "float32")
"""`max_length` and `dtype` of conf/model/tiny_qwen3.yaml."""
_SCRIPTS = (".py", ".sh")
_NO_URL = "it is not a URL that begins with http:// or https://"


def check_agents(config: RunConfig) -> None:
    """Raise `ConfigError` if an agent's command does not exist on this machine and the run is local."""
    for key, command in _commands(config):
        if config.cluster.on_this_machine and (fault := _fault(command)):
            raise ConfigError(key, list(command), "a command that can be started here", f"{fault}; change the command")


def warnings_of(config: RunConfig) -> list[str]:
    """The warnings about a run, one line each."""
    checks = (
        *(_changed_code, _tiny_settings, _unstable_dtype, _templates_without_tools),
        *(_absent_commands, _services, _cpu_overload, _idle_curriculum, _unread_preference),
    )
    of_engine = find_engine(config.inference.engine).warnings(config) if config.has_servers else ()
    return [*(line for check in checks for line in check(config)), *of_engine]


def _tiny_settings(config: RunConfig) -> Iterator[str]:
    """Warn if `model.path` was set without `model=`: length and dtype are then those of the tiny preset."""
    model = config.model
    if (model.max_length, model.dtype) != TINY_MODEL or is_built_in(model.path):
        return
    dtype, positions = stored_dtype(model), longest_sequence(model)
    own = " and ".join([*([f"{positions} positions"] if positions else []), *([f"dtype {dtype}"] if dtype else [])])
    also = f" and model.dtype={dtype}" if dtype in ("bfloat16", "float16") else ""
    yield (
        f"model.max_length={model.max_length} and model.dtype={model.dtype} come from the default model=tiny_qwen3, "
        f"not from {model.path}{own and f' ({own})'}: set model.max_length to the longest sample in tokens{also}"
    )


def _idle_curriculum(config: RunConfig) -> Iterator[str]:
    """Warn if no prompt comes often enough for `rollout.curriculum` to choose."""
    keys = config.rollout.curriculum
    if keys.weight == 1 or not config.has_rl or config.training.jobs:
        return
    task = load_task(config.task, config.seed)
    positions = config.training.steps * config.training.prompts_per_step
    shares = sum(part.share for part in task.parts)
    sizes = [part.size * shares / part.share for part in task.parts] or [len(task)]
    if positions <= keys.tries * min(sizes):
        yield (
            f"rollout.curriculum.weight={keys.weight} has no effect: it chooses among prompts that come more than "
            f"{keys.tries} times, and {positions} groups ({config.training.steps} steps) are at most "
            f"{positions / min(sizes):.2g} epochs of the prompts; train more steps, or fewer prompts, such as by "
            "task.options.size"
        )


def _unread_preference(config: RunConfig) -> Iterator[str]:
    """Warn about changed keys of preference training in a run that has none."""
    if config.has_preference or config.evaluation.only or config.serve.enabled or config.training.jobs:
        return
    keys = (f"preference.{name}" for name in type(config.preference).model_fields)
    changed = [f"{key}={value_of(config, key)}" for key in keys if value_of(config, key) != default_of(key)]
    if changed:
        yield f"{', '.join(changed)} has no effect without preference training: set preference.epochs and data.path"


def _unstable_dtype(config: RunConfig) -> Iterator[str]:
    """Warn if gradients of the model are likely not finite in its compute type."""
    if not config.evaluation.only and has_unstable_gradients(config.model):
        yield (
            f"gradients of {model_family(config.model)} were seen to be not finite in float16: watch the metric "
            "skipped, or set model.dtype=bfloat16"
        )


def _changed_code(config: RunConfig) -> Iterator[str]:
    """Warn about code that changed: a run that has begun executes its own copy of it."""
    run = RunPaths(config.directory.resolve())
    if config.resume != "scratch" and has_begun(run) and (files := changed_files(run)):
        named = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} others" if len(files) > 3 else "")
        yield (
            f"{named} changed since the run was created, which continues with its own copy; a new run, "
            f"name={config.name}-2, takes the current files"
        )


def _templates_without_tools(config: RunConfig) -> Iterator[str]:
    """Warn if the chat template ignores `tools`, so that rows and prompts lack them."""
    conversations = [*islice(_with_tools(config), 1)]
    if not conversations:
        return
    where, messages, tools = conversations[0]
    template = ChatTokenizer(model_directory(config.model)).template
    try:
        if template.render(messages, tools) != template.render(messages, ()):
            return
    except TemplateError:
        return  # each row, or the first prompt, fails with the reason
    yield (
        f"the chat template of {config.model.path} ignores `tools`, which {where} has: the model does not see them; "
        "put a chat_template.jinja that writes them into the model's directory, or describe them in a system message"
    )


def _with_tools(config: RunConfig) -> Iterator[tuple[str, Sequence[Message], Sequence[Mapping[str, Any]]]]:
    if config.data.path and config.has_sft and not config.training.jobs:
        part, _ = train_eval_split(config.data)
        for index in part.indices[:CHECKED_ROWS]:
            try:
                conversation = part.examples[index].conversation
            except RowError:
                continue
            if conversation.tools:
                yield f"row {index} of data.path", conversation.messages, conversation.tools
    if config.has_rollouts:
        for prompt in load_task(config.task, config.seed).first_prompts():
            if prompt.tools:
                yield f"task.name={prompt.task or config.task.name}", prompt.messages, prompt.tools


def _absent_commands(config: RunConfig) -> Iterator[str]:
    for key, command in _commands(config):
        if fault := _fault(command):
            yield f"{key}: {fault}: each sample fails if the nodes of the job lack it too"


def _commands(config: RunConfig) -> Iterator[tuple[str, Sequence[str]]]:
    for key, task in _tasks(config):
        command = task.options.get("command")
        if (
            task.name == "agent"
            and isinstance(command, list | tuple)
            and all(isinstance(part, str) for part in command)
        ):
            yield f"{key}.options.command", command


def _fault(command: Sequence[str]) -> str:
    """Why a command cannot be started on this machine; empty if no reason is known."""
    if not command:
        return ""
    program, *arguments = command
    if shutil.which(program) is None:
        return f"there is no program {program!r} in PATH" if "/" not in program else f"{program!r} is not a program"
    script = arguments[0] if arguments else ""
    if Path(script).suffix in _SCRIPTS and "{" not in script and not Path(script).is_file():
        return f"there is no file {script!r}"
    return ""


def _services(config: RunConfig) -> Iterator[str]:
    for key, task in _tasks(config):
        service = task.options.get("service")
        if task.name == "agent" and isinstance(service, str) and service and (fault := _unreachable(service)):
            yield f"{key}.options.service={service}: {fault}: each sample fails until it answers"
    for key, reward in _rewards(config):
        options = reward.options.get("judge", {})
        if JUDGE in reward.functions and isinstance(options.get("url"), str) and (fault := _judge_fault(options)):
            yield f"{key}.options.judge: {fault}: each sample fails until it answers"


def _judge_fault(options: Mapping[str, Any]) -> str:
    """Why the judge may not answer; empty if it lists the model or has no list of models."""
    url, model, key_file = options["url"], options.get("model"), options.get("key_file")
    if not _is_http(url):
        return _NO_URL
    if key_file and not Path(str(key_file)).is_file():
        return f"there is no key_file {key_file}"
    headers = {"Authorization": f"Bearer {Path(str(key_file)).read_text().strip()}"} if key_file else {}
    try:
        with urlopen(Request(f"{url.rstrip('/')}/models", headers=headers), timeout=ANSWER_SECONDS) as answer:
            names = [str(entry["id"]) for entry in json.load(answer)["data"]]
    except HTTPError as error:
        return f"{url} refuses the key (status {error.code})" if error.code in (401, 403) else ""
    except (OSError, URLError, ValueError) as error:
        return _no_answer(url, error) if isinstance(error, OSError) else ""
    except (LookupError, TypeError):
        return ""
    return "" if model in names else f"{url} has no model {model!r}, but {', '.join(names[:5]) or 'none'}"


def _unreachable(url: str) -> str:
    """Why a URL cannot be reached; empty if a server responds, with any status."""
    if not _is_http(url):
        return _NO_URL
    try:
        with urlopen(Request(url, method="HEAD"), timeout=ANSWER_SECONDS):
            return ""
    except HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return _no_answer(url, error)


def _is_http(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https")


def _no_answer(url: str, error: Exception) -> str:
    return f"no answer from {url} on this machine ({getattr(error, 'reason', None) or error})"


def _tasks(config: RunConfig) -> Iterator[tuple[str, TaskConfig]]:
    """The tasks of a run by their keys, and those of a mix each."""
    if config.has_rollouts or (config.evaluation.only and config.evaluation.builtin_set):
        yield from _alone("task", config.task)
    if config.has_rollouts or config.evaluation.only:
        for name, eval_set in config.evaluation.sets.items():
            if eval_set.task:
                yield from _alone(f"evaluation.sets.{name}.task", eval_set.task)


def _alone(key: str, task: TaskConfig) -> Iterator[tuple[str, TaskConfig]]:
    keys = [f"{key}.tasks.{number}" for number in range(len(task.tasks))] or [key]
    yield from zip(keys, task.alone(), strict=True)


def _rewards(config: RunConfig) -> Iterator[tuple[str, RewardConfig]]:
    if config.has_rollouts or config.evaluation.only:
        yield "reward", config.reward
        for name, eval_set in config.evaluation.sets.items():
            if eval_set.reward:
                yield f"evaluation.sets.{name}.reward", eval_set.reward


def _cpu_overload(config: RunConfig) -> Iterator[str]:
    """Warn if a local run has too many threads or task processes for the cores of this machine."""
    if not config.cluster.on_this_machine:
        return
    cores, resources = len(os.sched_getaffinity(0)), config.resources
    threads = resources.trainer.nodes * resources.trainer.processes * resources.trainer.threads
    if config.has_servers:
        threads += resources.inference.nodes * resources.inference.servers * resources.inference.threads
    if resources.device == "cpu" and threads > MAX_CPU_LOAD * cores:
        yield (
            f"this machine has {cores} cores for {threads} threads of trainers and servers, which slow each other "
            "down; lower resources.trainer.processes, .threads or resources.inference.servers, .threads"
        )
    if config.has_rollouts and config.task.processes > MANY_WORKERS * cores:
        yield (
            f"this machine has {cores} cores for {config.task.processes} processes of the task; lower "
            "task.processes, unless they mostly wait"
        )
