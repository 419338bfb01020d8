"""Programs as answers: which tests they pass, and what those that cheat, hang or break come to."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TaskConfig
from pipeline.environments import code_task, load_task
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.code_task import Code, extract_program, read_checks
from pipeline.environments.reward_functions import PartialScore
from pipeline.environments.sandbox import SandboxResult, run_python
from pipeline.environments.task_calls import InProcessCalls
from pipeline.environments.task_protocol import Completion
from tests.unit.environments.test_tasks import TINY

ADD = {"prompt": "Write add.", "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 5) == 4"]}
ECHO = {"prompt": "Print the sum.", "tests": json.dumps({"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", ["7"]]})}
CHECK = {"prompt": "Write add.", "tests": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}


def reward(folder: Path, row: dict[str, Any], program: str, **options: Any) -> float | str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    settings = {"path": str(path), "eval_rows": 1, "test_seconds": 20, **options}
    task = load_task(TaskConfig(name="code", options=settings), 0)
    assert isinstance(task, Code)
    part = InProcessCalls(task, ChatTemplate(TINY)).score(
        0, task.prompt(0), Completion(f"Here:\n```python\n{program}\n```\nDone.")
    )
    return part.score if isinstance(part, PartialScore) else part  # type: ignore[return-value]


RIGHT = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("row", "program", "whole", "partial"),
    [
        (ADD, RIGHT, 1.0, 1.0),
        (ADD, "def add(a, b):\n    return abs(a) + abs(b)", 0.0, 2 / 3),
        (ADD, "def add(a, b:", 0.0, 0.0),
        (ADD, "import sys\nsys.exit(0)", 0.0, 0.0),
        (ADD, "import os\nprint('passed')\nos._exit(0)", 0.0, 0.0),
        (CHECK, RIGHT, 1.0, 1.0),
        (CHECK, "def add(a, b):\n    return a", 0.0, 0.0),
        (ECHO, "print(sum(map(int, input().split())))", 1.0, 1.0),
        (ECHO, "print(3)", 0.0, 0.5),
        (ECHO, "print('the answer is')\nprint(sum(map(int, input().split())))", 0.0, 0.0),
    ],
)
def test_a_program_is_paid_for_the_tests_that_it_passes(
    row: dict[str, Any], program: str, whole: float, partial: float, tmp_path: Path
) -> None:
    assert reward(tmp_path, row, program) == whole
    assert reward(tmp_path, row, program, partial=True) == pytest.approx(partial)


def test_what_asserts_print_is_no_sign_of_success(tmp_path: Path) -> None:
    row = ADD | {"tests": ["print('x')\nassert add(1, 2) == 3\nprint('y', end='')"]}
    assert reward(tmp_path, row, RIGHT) == 1.0
    assert reward(tmp_path, row, "def add(a, b):\n    return 0") == 0.0


def test_after_a_test_that_runs_out_of_time_no_other_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[SandboxResult] = []

    def counted(*given: Any, **files: Any) -> SandboxResult:
        ran.append(run_python(*given, **files))
        return ran[-1]

    monkeypatch.setattr(code_task, "run_python", counted)
    assert reward(tmp_path, ADD, "while True: pass", partial=True, test_seconds=1.5) == 0.0
    assert [each.late for each in ran] == [True]


def test_a_row_without_tests_is_the_sample_s_failure(tmp_path: Path) -> None:
    row = {"prompt": "Write add.", "checks": ["assert True"]}
    assert reward(tmp_path, row, RIGHT) == (
        "reward raised ValueError: tests: the row has none; task.options.tests names their column"
    )
    assert reward(tmp_path, row, RIGHT, tests="checks") == 1.0


def test_the_program_is_the_last_block() -> None:
    assert extract_program("```python\na\n```\nno:\n```py\nb\n```") == "b\n"
    assert extract_program("print(1)") == "print(1)"


def test_checks_of_input_and_output_need_one_output_each() -> None:
    with pytest.raises(ValueError, match="as many outputs as inputs"):
        read_checks({"inputs": ["1"], "outputs": []})


def test_most_tests_bounds_what_is_run(tmp_path: Path) -> None:
    row = ADD | {"tests": ["assert add(1, 2) == 3", "assert False"]}
    assert reward(tmp_path, row, RIGHT) == 0.0
    assert reward(tmp_path, row, RIGHT, max_tests=1) == 1.0
