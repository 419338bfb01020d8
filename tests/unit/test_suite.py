"""What is tried again, and what is not; and with how many threads tests compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FAILS_ONCE = """
from pathlib import Path
import pytest

{mark}
def test_unsteady():
    print("seen by the test")
    mark = Path(__file__).with_suffix(".tried")
    tried = mark.exists()
    mark.touch()
    assert tried, "the first time"

def test_steady():
    pass
"""
ALWAYS_FAILS = """
import pytest

@pytest.mark.integration
@pytest.mark.parametrize("case", range({cases}))
def test_broken(case):
    assert False, "each time"
"""


def run_suite(folder: Path, text: str, workers: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "test_case.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = integration\n")
    suite = ("-n", str(workers), "--dist", "loadfile")
    code = f"import sys; from tests.suite import main; sys.exit(main([], {suite}))"
    plugins = {"PYTEST_PLUGINS": "xdist.plugin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to load
    environment = os.environ | plugins | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_test_of_processes_that_passes_alone_is_flaky_and_shown_with_both_outputs(tmp_path: Path) -> None:
    ended = run_suite(tmp_path, FAILS_ONCE.format(mark="@pytest.mark.integration"), workers=1)
    assert ended.returncode == 0, ended.stdout
    told = ended.stdout[ended.stdout.index("===== flaky") :]
    assert "test_unsteady" in told
    assert "test_steady" not in told
    first, second = told.split("----- alone it passed:")
    assert "the first time" in first
    assert "seen by the test" in second
    assert "1 flaky" in second


def test_a_test_of_one_process_is_not_tried_again(tmp_path: Path) -> None:
    ended = run_suite(tmp_path, FAILS_ONCE.format(mark=""))
    assert ended.returncode == 1
    assert "not tried again, since they wait for no other process" in ended.stdout
    assert "once more" not in ended.stdout


@pytest.mark.parametrize(("cases", "reason"), [(1, "failed twice"), (6, "not tried again, since more than 5 failed")])
def test_what_fails_twice_or_in_numbers_fails_the_suite(tmp_path: Path, cases: int, reason: str) -> None:
    ended = run_suite(tmp_path, ALWAYS_FAILS.format(cases=cases))
    assert ended.returncode == 1
    assert reason in ended.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_read_fails_the_suite(tmp_path: Path, workers: int) -> None:
    ended = run_suite(tmp_path, "import nothing_of_this_name", workers)
    assert ended.returncode in (1, 2)
    assert "once more" not in ended.stdout


def test_torch_was_loaded_after_it_was_told_to_use_one_thread() -> None:
    assert torch.get_num_threads() == 1
