"""`pipeline.metrics`: one row a step over all attempts, whatever crashed."""

import json
import logging
import math
from pathlib import Path

import pytest

from pipeline.metrics import Console, MetricSinks, Row, RowReader, read_rows, series
from pipeline.tracking import chosen_mode


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.closed = False

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(path: Path, kind: str = "train", job: str = "rl") -> list[int]:
    return [row["step"] for row in read_rows(path) if (row["kind"], row["job"]) == (kind, job)]


def test_a_row_holds_what_the_spec_names(path: Path) -> None:
    with MetricSinks(path, "12-0", clock=lambda: 5.0) as sinks:
        assert sinks.log("train", "rl", 1, {"reward/mean": 0.5, "lag/max": 2.0})
    assert json.loads(path.read_text()) == {
        "kind": "train",
        "job": "rl",
        "step": 1,
        "time": 5.0,
        "attempt": "12-0",
        "reward/mean": 0.5,
        "lag/max": 2.0,
    }


def test_steps_trained_again_after_a_resume_are_not_logged_twice(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        for step in range(1, 33):
            sinks.log("train", "rl", step, {"loss": 1.0})
    kept = Kept()
    with MetricSinks(path, "12-1", [kept]) as sinks:
        logged = [sinks.log("train", "rl", step, {"loss": 2.0}) for step in range(26, 36)]
    assert logged == [False] * 7 + [True] * 3
    assert steps(path) == list(range(1, 36))
    assert [row["step"] for row in kept.rows] == [33, 34, 35]


def test_evaluations_have_a_mark_of_their_own(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 30, {})
        assert sinks.log("eval", "rl", 25, {"eval/accuracy": 0.5}), "an evaluation may come later than its step"
        assert not sinks.log("eval", "rl", 25, {"eval/accuracy": 0.6})
    assert steps(path, "eval") == [25]


def test_the_warm_start_is_over_once_rl_has_logged(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        assert sinks.log("train", "sft", 200, {})
        assert sinks.log("train", "rl", 1, {}), "RL begins at its own first step"
        assert not sinks.log("train", "sft", 201, {})


def test_a_last_line_torn_by_a_crash_is_cut_and_its_step_is_logged_again(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 1, {"loss": 1.0})
        sinks.log("train", "rl", 2, {"loss": 1.0})
    path.write_bytes(path.read_bytes()[:-9])
    with MetricSinks(path, "12-1") as sinks:
        assert sinks.log("train", "rl", 2, {"loss": 3.0})
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0, 3.0]


def test_a_number_that_is_not_finite_is_null_in_the_file_and_absent_in_a_series(path: Path) -> None:
    kept = Kept()
    with MetricSinks(path, "12-0", [kept]) as sinks:
        sinks.log("train", "rl", 1, {"loss": math.nan, "grad_norm": math.inf})
        sinks.log("train", "rl", 2, {"loss": 0.5})
    assert kept.rows[0]["loss"] is None
    assert "NaN" not in path.read_text()
    assert read_rows(path)[0]["grad_norm"] is None
    assert series(read_rows(path), "loss") == [(2, 0.5)]


def test_the_cursor_is_the_size_of_the_file(path: Path) -> None:
    for attempt in ("12-0", "12-1"):
        with MetricSinks(path, attempt) as sinks:
            sinks.log("train", "rl", 1 + int(attempt[-1]), {"loss": 1.0})
            assert sinks.cursor == path.stat().st_size


def test_a_reader_gets_each_row_once_while_the_file_grows(path: Path) -> None:
    reader = RowReader(path)
    assert reader.read() == []
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 1, {})
        assert [row["step"] for row in reader.read()] == [1]
        with path.open("ab") as file:
            file.write(b'{"kind":"train","job":"rl","st')
        assert reader.read() == [], "half a line is not a row yet"
        with path.open("ab") as file:
            file.write(b'ep":2,"time":0.0}\n')
        assert [row["step"] for row in reader.read()] == [2]
    assert [row["step"] for row in reader.rows] == [1, 2]


def test_lines_that_are_no_rows_are_passed_over(path: Path) -> None:
    path.write_text('[1]\nnonsense\n{"kind":"train"}\n{"kind":"train","job":"rl","step":1,"time":0.0}\n')
    assert steps(path) == [1]


def test_closing_closes_every_sink(path: Path) -> None:
    kept = Kept()
    MetricSinks(path, "12-0", [kept]).close()
    assert kept.closed


def test_the_console_says_each_row_with_the_numbers_that_it_has(caplog: pytest.LogCaptureFixture) -> None:
    console = Console()
    with caplog.at_level(logging.INFO, "pipeline.metrics"):
        console.write({"kind": "train", "job": "rl", "step": 10, "reward/mean": 0.25})
        console.write({"kind": "eval", "job": "rl", "step": 9, "eval/accuracy": 0.5})
    assert caplog.messages == ["rl step 10 reward/mean=0.25", "rl step 9 eval/accuracy=0.5"]


@pytest.mark.parametrize("asked", ["online", "offline", "off"])
def test_a_mode_of_wandb_that_is_asked_for_is_taken(asked: str, tmp_path: Path) -> None:
    assert chosen_mode(asked, {"WANDB_API_KEY": "key"}, tmp_path / "none") == asked


def test_auto_goes_online_with_a_key_or_a_login_and_else_stays_offline(tmp_path: Path) -> None:
    logins = tmp_path / ".netrc"
    assert chosen_mode("auto", {}, logins) == "offline"
    assert chosen_mode("auto", {"WANDB_API_KEY": "key"}, logins) == "online"
    logins.write_text("machine elsewhere.example login a password b\n")
    assert chosen_mode("auto", {}, logins) == "offline"
    logins.write_text("machine api.wandb.ai login user password key\n")
    assert chosen_mode("auto", {}, logins) == "online"
