"""What is tried again, and what is not; and with how many threads tests compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import WAIT_SECONDS
from tests.workers import WAITERS

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
FAIL_TOGETHER = """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def service():
    mark = Path(__file__).with_suffix(".tried")
    yield mark.exists()
    mark.touch()

@pytest.mark.integration
@pytest.mark.parametrize("case", range(8))
def test_of_the_service(service, case):
    assert service, "it crashed"
"""
ALWAYS_FAILS = """
import pytest

@pytest.mark.integration
def test_broken():
    assert False, "each time"
"""
NOTES_ITS_WORKER = """
import os, time
from pathlib import Path

def test_case():
    Path(__file__).with_suffix(".worker").write_text(os.environ["PYTEST_XDIST_WORKER"])
    began = time.monotonic()
    while {waits} and len(list(Path(__file__).parents[1].glob("unit/*.worker"))) < 4:
        assert time.monotonic() - began < 60
        time.sleep(0.05)
"""


def run_suite(folder: Path, text: str, workers: int = 0, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_case.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = integration\n")
    suite = ("-n", str(workers), "--dist", "loadfile", *options)
    code = f"import sys; from tests.suite import main; sys.exit(main([], {suite}))"
    plugins = {"PYTEST_PLUGINS": "xdist.plugin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to load
    environment = os.environ | plugins | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)


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


def test_tests_of_one_file_that_failed_together_are_tried_again_together(tmp_path: Path) -> None:
    ended = run_suite(tmp_path, FAIL_TOGETHER)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("once more, alone") == 1
    assert "8 flaky" in ended.stdout


@pytest.mark.parametrize(("files", "reason"), [(1, "failed twice, one of"), (6, "since tests of more than 5 files")])
def test_what_fails_twice_or_in_many_files_fails_the_suite(tmp_path: Path, files: int, reason: str) -> None:
    for number in range(1, files):
        (tmp_path / f"test_{number}.py").write_text(ALWAYS_FAILS)
    ended = run_suite(tmp_path, ALWAYS_FAILS)
    assert ended.returncode == 1
    assert reason in ended.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_read_fails_the_suite(tmp_path: Path, workers: int) -> None:
    ended = run_suite(tmp_path, "import nothing_of_this_name", workers)
    assert ended.returncode in (1, 2)
    assert "once more" not in ended.stdout


def test_files_that_wait_run_beside_files_that_compute_and_all_workers_help_in_the_end(tmp_path: Path) -> None:
    """Each file notes its worker. The waiting ones end only when four others have ended."""
    waiting = ("cluster/test_a.py", "cluster/test_b.py", "protocol/test_c.py")
    for file in (*waiting, *(f"unit/test_{name}.py" for name in "defghi")):
        path = tmp_path / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NOTES_ITS_WORKER.format(waits=file in waiting))
    run_suite(tmp_path, "", 2 + WAITERS, "-p", "tests.workers")
    notes = {note.stem: note.read_text() for note in tmp_path.glob("tests/*/*.worker")}
    assert len(notes) == 9
    waiters, others = {"gw0", "gw1"}, {"gw2", "gw3"}
    assert {notes["test_a"], notes["test_b"]} == waiters
    assert notes["test_c"] in waiters
    assert {notes[f"test_{name}"] for name in "defg"} == others


def test_torch_was_loaded_after_it_was_told_to_use_one_thread() -> None:
    assert torch.get_num_threads() == 1
