"""Programs as answers, held to tests.

Owns the built-in task `code`: rows of a dataset with tests, the program in an answer, and how it is run against them in
the sandboxed process of `pipeline.environments.sandbox`. Promises that each test has a process of its own, with its own
seconds; that a program which ends, hangs or prints whatever it likes fails its test and nothing else; and that tests of
input and output never bring what is expected near the program. Asserts run where the program does, after it: that holds
accidents and idle cleverness, not a program that looks for them.

Tests of a row, in the column `task.options.tests`:

    "assert add(1, 2) == 3"                                   Python that is run after the program
    ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]        several of them, as MBPP has
    {"inputs": ["1 2"], "outputs": ["3"]}                     standard input, and what is to be printed; as JSON too

With a column `entry_point`, as HumanEval has, `check(<entry point>)` is called after the test.
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
    """One test: `code` that is run after the program, or `given` on standard input and `wanted` on standard output."""

    code: str = ""
    given: str = ""
    wanted: str | None = None


class CodeOptions(DatasetOptions):
    """Which rows, and how programs are run."""

    system: str = Field(WRITE, description="System message before each prompt that has none; empty: none.")
    tests: str = Field("tests", description="Column with the tests of a row, see docs/tasks.md.")
    partial: bool = Field(
        False, description="The reward is the fraction of passing tests; otherwise 1 if all tests pass, else 0."
    )
    most_tests: NotNegative = Field(16, description="Number of a row's tests to run, from the first on; 0: all.")
    test_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="Timeout of one test, in seconds.")
    test_memory_bytes: Annotated[int, Field(ge=1 << 24)] = Field(
        1 << 29, description="Memory limit of one test, in bytes."
    )


class Code(Dataset):
    """1 for a program that passes all tests."""

    name = "code"
    Options = CodeOptions
    options: CodeOptions
    has_reward = True

    @property
    def runs_code(self) -> bool:
        return True

    def reward(self, prompt: Prompt, text: str) -> float:
        tests = read_checks(prompt.columns.get(self.options.tests), prompt.columns.get("entry_point"))
        tests = tests[: self.options.most_tests or None]
        program = extract_program(text)
        passed = 0
        for test in tests if program else ():
            right, late = self._passes(program, test)
            passed += right
            if late or not (right or self.options.partial):
                break  # what comes after a test that ran out of time would too, and nobody is paid for waiting
        return passed / len(tests) if self.options.partial else float(passed == len(tests))

    def _passes(self, program: str, test: Check) -> tuple[bool, bool]:
        """Whether the program passes, and whether it ran out of time."""
        files, driver, done = {"answer.py": program}, _RUN, ""
        if test.wanted is None:
            done = secrets.token_hex(16)
            files["test.py"], driver = f"{test.code}\nprint()\nprint({done!r})\n", _CHECK
        seconds, memory = self.options.test_seconds, self.options.test_memory_bytes
        ran = run_python(driver, seconds, memory, files=files, given=test.given)
        if ran.failed:
            return False, ran.late
        return _mismatch_text(
            ran, test.wanted if test.wanted is not None else done, whole=test.wanted is not None
        ), False


def extract_program(text: str) -> str:
    """The last block of code in an answer, all of it where there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1] if blocks else text)


def read_checks(value: Any, entry_point: Any = None) -> list[Check]:
    """The tests of a row; `ValueError` for what has none."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise ValueError("tests: expected as many outputs as inputs, both lists")
        found = [Check(given=_line(given), wanted=_line(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    else:
        codes = [value] if isinstance(value, str) else list(value or ())
        call = f"\ncheck({entry_point})" if entry_point else ""
        found = [Check(code=f"{code}{call}") for code in codes]
    if not found:
        raise ValueError("tests: the row has none; task.options.tests names their column")
    return found


def _line(value: Any) -> str:
    """Lines of a program's input or output, which some datasets have as lists."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _mismatch_text(ran: SandboxResult, wanted: str, whole: bool) -> bool:
    """Whether it printed what is wanted, white space at the ends of lines aside: all of it, or as its last line."""
    said = [line.rstrip() for line in ran.output.strip().splitlines()]
    lines = [line.rstrip() for line in wanted.strip().splitlines()]
    return said == lines if whole else said[-1:] == lines
