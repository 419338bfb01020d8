"""Tasks that take their prompts from other tasks pass on what their workers and the launcher must know of these."""

import ast
from pathlib import Path
from typing import Any

import pytest

from pipeline import environments
from pipeline.config import TaskConfig
from pipeline.environments import Prompt, Task, load_task, user_prompt


class Demanding(Task):
    """Runs code in a sandbox only, starts something in each worker, and shows another first prompt."""

    name = "demanding"
    prepared = 0

    def __len__(self) -> int:
        return 3

    def prompt(self, index: int) -> Prompt:
        return user_prompt(str(index))

    def first_prompts(self) -> list[Prompt]:
        return [user_prompt("first")]

    def held_out(self) -> list[Prompt]:
        return [user_prompt("held out")]

    def reward(self, prompt: Prompt, text: str) -> float:
        return 1.0

    def prepare_worker(self) -> None:
        Demanding.prepared += 1

    @property
    def runs_code(self) -> bool:
        return True

    @property
    def needs_sandbox(self) -> bool:
        return True


OF: dict[str, Any] = {"name": f"{__name__}:Demanding"}
WRAPPING = {
    "AgentTask": {"name": "agent", "options": {"service": "http://127.0.0.1:1", "of": OF}},
    "Mix": {"name": "mix", "tasks": [{"name": "arithmetic"}, OF]},
}
"""The config of each, over that task."""


def takes_prompts_of_another(task: ast.ClassDef) -> bool:
    """Whether a class of a task has a method `prompt` that calls a method `prompt`."""
    if not any(ast.unparse(base).endswith("Task") for base in task.bases):
        return False
    methods = [one for one in task.body if isinstance(one, ast.FunctionDef) and one.name == "prompt"]
    calls = [call.func for method in methods for call in ast.walk(method) if isinstance(call, ast.Call)]
    return "prompt" in [call.attr for call in calls if isinstance(call, ast.Attribute)]


def test_all_tasks_that_take_prompts_of_others_are_tested_here() -> None:
    files = Path(environments.__file__).parent.rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    assert {task.name for task in classes if takes_prompts_of_another(task)} == WRAPPING.keys()


@pytest.mark.parametrize("config", WRAPPING.values(), ids=WRAPPING.keys())
def test_a_task_over_others_passes_on_their_needs(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Demanding, "prepared", 0)
    task = load_task(TaskConfig.model_validate(config), seed=3)
    task.prepare_worker()
    contents = [prompt.messages[0]["content"] for prompt in task.first_prompts()]
    assert (task.runs_code, task.needs_sandbox, Demanding.prepared, contents[-1]) == (True, True, 1, "first")
