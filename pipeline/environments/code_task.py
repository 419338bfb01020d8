"""Programs as answers, checked by tests.

Owns the built-in task `code`: rows of a dataset with tests, the program in an answer, and running it against the tests
in the sandboxed process of `pipeline.environments.sandbox`. Promises that each test has a separate process with a
separate timeout; that a program which exits, hangs or prints anything fails only its test; and that the expected output
of a test is never accessible to the program. Asserts run in the program's process, after the program. That prevents
accidents and simple tricks, but not a program that deliberately looks for the asserts.

Tests of a row, in the column `task.options.tests`:

    "assert add(1, 2) == 3"                                   Python that runs after the program
    ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]        several of them, as in MBPP
    {"inputs": ["1 2"], "outputs": ["3"]}                     standard input and expected output; also as JSON text

With a column `entry_point`, as in HumanEval, `check(<entry point>)` is called after the test.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from pipeline.config.value_types import NotNegative
from pipeline.environments.dataset_task import Dataset, DatasetOptions
from pipeline.environments.sandbox import SandboxResult, run_python
from pipeline.environments.task_protocol import Prompt

WRITE = "Answer with one Python program, in a block that begins with ```python and ends with ```."
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_RUN = "exec(compile(open('answer.py').read(), 'answer.py', 'exec'), {'__name__': '__main__'})"
_CHECK = """
scope = {"__name__": "answer"}
exec(compile(open("answer.py").read(), "answer.py", "exec"), scope)
exec(compile(open("test.py").read(), "test.py", "exec"), scope)
"""


@dataclass(frozen=True)
class Check:
    """One test: `code` that runs after the program, or `stdin` with the `expected` standard output."""

    code: str = ""
    stdin: str = ""
    expected: str | None = None


class CodeOptions(DatasetOptions):
    """The rows, their tests, and the limits of a test."""

    system: str = Field(WRITE, description="System message before each prompt that has none; empty: none.")
    tests: str = Field("tests", description="Column with the tests of a row, see docs/tasks.md.")
    partial: bool = Field(
        False, description="The reward is the fraction of passing tests; otherwise 1 if all tests pass, else 0."
    )
    max_tests: NotNegative = Field(16, description="Number of a row's tests to run, from the first on; 0: all.")
    test_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="Timeout of one test, in seconds.")
    test_memory_bytes: Annotated[int, Field(ge=1 << 24)] = Field(
        1 << 29, description="Memory limit of one test, in bytes."
    )


class Code(Dataset):
    """Reward 1 for a program that passes all tests; with `partial` the fraction of passing tests."""

    name = "code"
    Options = CodeOptions
    options: CodeOptions
    has_reward = True

    @property
    def runs_code(self) -> bool:
        return True

    def reward(self, prompt: Prompt, text: str) -> float:
        tests = read_checks(prompt.columns.get(self.options.tests), prompt.columns.get("entry_point"))
        tests = tests[: self.options.max_tests or None]
        program = extract_program(text)
        passed = 0
        for test in tests if program else ():
            right, late = self._passes(program, test)
            passed += right
            if late or not (right or self.options.partial):
                break  # later tests of a program that timed out would time out too, and the reward is decided
        return passed / len(tests) if self.options.partial else float(passed == len(tests))

    def _passes(self, program: str, test: Check) -> tuple[bool, bool]:
        """Whether the program passes, and whether it timed out."""
        files, driver, done = {"answer.py": program}, _RUN, ""
        if test.expected is None:
            # A random word, printed last, proves that the test ran to its end.
            done = secrets.token_hex(16)
            files["test.py"], driver = f"{test.code}\nprint()\nprint({done!r})\n", _CHECK
        seconds, memory = self.options.test_seconds, self.options.test_memory_bytes
        ran = run_python(driver, seconds, memory, files=files, stdin=test.stdin)
        if ran.failed:
            return False, ran.late
        whole = test.expected is not None
        return _has_output(ran, done if test.expected is None else test.expected, whole=whole), False


def extract_program(text: str) -> str:
    """The last code block of an answer, or the whole text if it has no block."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1] if blocks else text)


def read_checks(value: Any, entry_point: Any = None) -> list[Check]:
    """The tests of a row; `ValueError` if it has none."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise ValueError("tests: expected as many outputs as inputs, both lists")
        checks = [Check(stdin=_line(i), expected=_line(o)) for i, o in zip(inputs, outputs, strict=True)]
    else:
        codes = [value] if isinstance(value, str) else list(value or ())
        call = f"\ncheck({entry_point})" if entry_point else ""
        checks = [Check(code=f"{code}{call}") for code in codes]
    if not checks:
        raise ValueError("tests: the row has none; task.options.tests names their column")
    return checks


def _line(value: Any) -> str:
    """The text of a program's input or output, which some datasets store as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _has_output(ran: SandboxResult, expected: str, whole: bool) -> bool:
    """Whether the program printed what is expected, as its whole output or as its last line. Trailing white space of a
    line is ignored."""
    printed = [line.rstrip() for line in ran.output.strip().splitlines()]
    lines = [line.rstrip() for line in expected.strip().splitlines()]
    return printed == lines if whole else printed[-1:] == lines
