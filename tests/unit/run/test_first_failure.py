"""`pipeline.run.first_failure` and `pipeline.utils.logs`: what people read when something went wrong."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run.first_failure import FirstFailure
from pipeline.utils import logs, shared_files


def failure(cause: str, *last_lines: str, hint: str = "") -> FirstFailure:
    return FirstFailure(
        role="actor.0", rank=3, cause=cause, exit_code=None, time=1.0, log="a.log", last_lines=last_lines, hint=hint
    )


def test_one_line_names_role_rank_cause_last_word_and_mend() -> None:
    line = failure("exited with code 1", "first", "ValueError: no task", " ", hint="fix the task").one_line()
    assert line == "actor.0 on rank 3: exited with code 1 (last line: ValueError: no task); fix the task"


@pytest.mark.parametrize(
    ("cause", "last_line", "advice"),
    [
        ("killed by SIGKILL", "", "dmesg"),
        (
            "exited with code 1, and the kernel ended 2 of this node's processes for lack of memory",
            "",
            "cluster.memory",
        ),
        ("killed by SIGKILL", "RuntimeError: CUDA out of memory", "micro_batch_tokens"),
        ("exited with code 1", "OSError: [Errno 28] No space left on device", "disk is full"),
        ("hung: its process 0 (pid 7) makes no progress for 181 s", "", "cluster.heartbeat_seconds"),
        ("waited 240.0 s for inference.0 to become ready", "", "cluster.startup_seconds"),
        ("exited with code 1", "something unheard of", "a.log"),
    ],
)
def test_every_failure_says_what_to_do(cause: str, last_line: str, advice: str) -> None:
    assert advice in failure(cause, last_line).hint


def test_a_failure_is_one_line_even_when_its_cause_is_not() -> None:
    assert "\n" not in failure("a\nb", "c").one_line()


def test_what_to_do_is_in_the_file_too(tmp_path: Path) -> None:
    written = failure("killed by SIGKILL")
    shared_files.write_document(tmp_path / "first_failure.json", written)
    assert b"dmesg" in (tmp_path / "first_failure.json").read_bytes()
    assert shared_files.read_document(tmp_path / "first_failure.json", FirstFailure) == written


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Where the root logger writes during the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    text = io.StringIO()
    logs.configure("actor.0", stream=text)
    yield text
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)


def test_a_record_is_one_line_with_its_role(log: io.StringIO) -> None:
    logging.getLogger("any").info("two\nlines")
    (line,) = log.getvalue().splitlines()
    assert line.endswith(" INFO actor.0 two ⏎ lines")


def test_a_traceback_is_indented_below_its_record(log: io.StringIO) -> None:
    try:
        raise ValueError("reason")
    except ValueError:
        logging.getLogger("any").exception("it failed")
    first, *rest = log.getvalue().splitlines()
    assert first.endswith(" ERROR actor.0 it failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert rest[-1].endswith("ValueError: reason")


def test_a_library_whose_logger_asks_for_more_does_not_fill_the_log(log: io.StringIO) -> None:
    library = logging.getLogger("a.library")
    library.setLevel(logging.DEBUG)
    library.debug("every detail")
    assert log.getvalue() == ""


def test_a_chosen_module_and_those_below_it_log_everything_and_a_namesake_does_not() -> None:
    text = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        logs.configure("actor.0", "error", ["some.module"], stream=text)
        for name in ("some.module", "some.module.below", "some.modules", "some"):
            logging.getLogger(name).debug("details of %s", name)
            logging.getLogger(name).warning("warning of %s", name)
        logging.getLogger("any").error("trouble")
    finally:
        logging.captureWarnings(False)
        logging.getLogger("some.module").setLevel(logging.NOTSET)
        root.handlers[:] = before
        root.setLevel(level)
    messages = [line.partition(" actor.0 ")[2] for line in text.getvalue().splitlines()]
    chosen = ["some.module", "some.module.below"]
    assert messages == [f"{kind} of {name}" for name in chosen for kind in ("details", "warning")] + ["trouble"]
