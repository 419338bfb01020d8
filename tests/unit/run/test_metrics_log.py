"""`pipeline.run.metrics_log`: one row a step over all attempts, whatever crashed."""

import json
import logging
import math
from pathlib import Path

import pytest

from pipeline.run.metrics_log import (
    Console,
    FileStep,
    MetricRecord,
    MetricSinks,
    RowReader,
    read_rows,
    roll_back,
    roll_back_file,
    series,
)
from tests.fakes.full_disk import room_for


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.rows: list[MetricRecord] = []
        self.closed = False

    def write(self, row: MetricRecord) -> None:
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
        sinks.log("train", "rl", 1, {"reward/mean": 0.5, "staleness/max": 2.0})
    assert json.loads(path.read_text()) == {
        "kind": "train",
        "job": "rl",
        "step": 1,
        "time": 5.0,
        "attempt": "12-0",
        "reward/mean": 0.5,
        "staleness/max": 2.0,
    }


def test_steps_that_are_trained_again_have_the_row_of_the_second_time(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        for step in range(1, 33):
            sinks.log("train", "rl", step, {"loss": 1.0})
    roll_back(path, "rl", 25)
    with MetricSinks(path, "12-1") as sinks:
        for step in range(26, 36):
            sinks.log("train", "rl", step, {"loss": 2.0})
    assert steps(path) == list(range(1, 36))
    assert [row["loss"] for row in read_rows(path)] == [1.0] * 25 + [2.0] * 10


def test_the_steps_of_files_are_counted_on_and_only_those_of_one_file_go(path: Path) -> None:
    """`b` is interrupted with its second step uncommitted, `a` is written anew, and `b` goes on after it."""

    def train(file: str, written: int, steps: range) -> int:
        begun = FileStep(file, written, steps[0] - 1, 4)
        last = roll_back_file(path, begun)
        with MetricSinks(path, "12-0") as sinks:
            for step in steps:
                at = FileStep(file, written, step, 4)
                sinks.log("train", "sft", last + step - begun.done, {"loss": 1.0}, at)
        return last

    begun = [
        train("a", 1, range(1, 3)),
        train("b", 2, range(1, 3)),
        train("a", 3, range(1, 3)),
        train("b", 2, range(2, 4)),
    ]
    assert begun == [0, 2, 4, 6]
    rows = [(row["step"], row["file"], row["done"]) for row in read_rows(path)]
    first, second = [(1, "a", 1), (2, "a", 2), (3, "b", 1)], [(5, "a", 1), (6, "a", 2), (7, "b", 2), (8, "b", 3)]
    assert rows == first + second


def test_rows_of_a_later_job_go_when_the_run_goes_back_to_an_earlier_one(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        for job, step in (("sft", 1), ("sft", 2), ("rl", 1)):
            sinks.log("train", job, step, {})
    roll_back(path, "rl", 0)
    assert (steps(path, job="sft"), steps(path)) == ([1, 2], [])
    roll_back(path, "sft", 1)
    assert steps(path, job="sft") == [1]


def test_an_evaluation_of_weights_that_stay_keeps_its_row_however_late_it_came(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 25, {})
        sinks.log("train", "rl", 26, {})
        sinks.log("eval", "rl", 25, {"eval/accuracy": 0.5})
        sinks.log("eval", "rl", 26, {"eval/accuracy": 0.5})
    roll_back(path, "rl", 25)
    assert (steps(path), steps(path, "eval")) == ([25], [25])


def test_nothing_is_rolled_back_where_nothing_was_logged(path: Path) -> None:
    roll_back(path, "rl", 25)
    assert not path.exists()


@pytest.mark.parametrize("room", [0, 30])
def test_rows_that_a_full_disk_does_not_take_are_written_when_there_is_room(
    path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 1, {"loss": 1.0})
        with room_for(path.stat().st_size + room):
            for step in (2, 3):
                sinks.log("train", "rl", step, {"loss": 1.0})
            sinks.flush()
            assert steps(path) == [1]
        sinks.log("train", "rl", 4, {"loss": 1.0})
    assert steps(path) == [1, 2, 3, 4]
    assert [record.message.partition(": ")[0] for record in caplog.records] == [f"{path} gets its next lines later"]


def test_a_row_that_a_replaced_writer_ends_late_is_seen_by_nobody(path: Path) -> None:
    """It looked whether it may write, and hangs; the next owner begins meanwhile."""

    def hang() -> None:
        roll_back(path, "rl", 1)
        with MetricSinks(path, "12-1") as owner:
            owner.log("train", "rl", 2, {})

    with MetricSinks(path, "12-0") as first:
        first.log("train", "rl", 1, {})
    with MetricSinks(path, "12-0", check=hang) as zombie:
        zombie.log("train", "rl", 2, {})
    assert [(row["step"], row["attempt"]) for row in read_rows(path)] == [(1, "12-0"), (2, "12-1")]


def test_a_last_line_torn_by_a_crash_is_cut_and_its_step_is_logged_again(path: Path) -> None:
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 1, {"loss": 1.0})
        sinks.log("train", "rl", 2, {"loss": 1.0})
    path.write_bytes(path.read_bytes()[:-9])
    roll_back(path, "rl", 2)
    with MetricSinks(path, "12-1") as sinks:
        sinks.log("train", "rl", 2, {"loss": 3.0})
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


def test_a_reader_gets_each_row_once_while_the_file_grows(path: Path) -> None:
    reader = RowReader(path)
    assert reader.read() == []
    with MetricSinks(path, "12-0") as sinks:
        sinks.log("train", "rl", 1, {})
        assert [row["step"] for row in reader.read()] == [1]
        assert reader.is_first
        with path.open("ab") as file:
            file.write(b'{"kind":"train","job":"rl","st')
        assert reader.read() == [], "half a line is not a row yet"
        with path.open("ab") as file:
            file.write(b'ep":2,"time":0.0}\n')
        assert [row["step"] for row in reader.read()] == [2]
        assert not reader.is_first


def test_a_reader_begins_anew_when_rows_were_rolled_back(path: Path) -> None:
    reader = RowReader(path)
    with MetricSinks(path, "12-0") as sinks:
        for step in (1, 2, 3):
            sinks.log("train", "rl", step, {})
    assert len(reader.read()) == 3
    roll_back(path, "rl", 1)
    with MetricSinks(path, "12-1") as sinks:
        for step in (2, 3, 4):
            sinks.log("train", "rl", step, {})
    rows = reader.read()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["attempt"] for row in rows] == ["12-0", "12-1", "12-1", "12-1"]
    assert reader.is_first


def test_lines_that_are_no_rows_are_passed_over(path: Path) -> None:
    path.write_text('[1]\nnonsense\n{"kind":"train"}\n{"kind":"train","job":"rl","step":1,"time":0.0}\n')
    assert steps(path) == [1]


ROW = {"kind": "train", "job": "rl", "step": 1, "time": 0.0}
FILE = {"file": "a", "written": 1, "done": 1, "of": 4}


@pytest.mark.parametrize(
    "damage",
    [
        {"step": "1"},
        {"step": None},
        {"step": 1.5},
        {"step": True},
        {"step": 10**40},
        {"time": None},
        {"time": "now"},
        {"time": 1e300},
        {"kind": ["train"]},
        {"job": "other"},
        {"job": 3},
    ],
)
def test_a_row_without_a_step_or_a_time_is_none(path: Path, damage: dict[str, object]) -> None:
    path.write_text(f"{json.dumps(ROW | damage)}\n{json.dumps(ROW | {'step': 2})}\n")
    assert steps(path) == [2]
    assert roll_back(path, "rl", 2) == 1, "a row that no reader gets is not kept"


def test_a_line_of_too_many_brackets_is_no_row(path: Path) -> None:
    path.write_text(f'{{"a":{"[" * 100_000}\n{json.dumps(ROW)}\n')
    assert steps(path) == [1]


@pytest.mark.parametrize("value", ["0.5", True, [1], {"a": 1}, 1e308, -1e308, pytest.param(10**400, id="int")])
def test_a_metric_that_is_no_number_is_absent(path: Path, value: object) -> None:
    path.write_text(json.dumps(ROW | {"reward/mean": value, "loss": 1, "kl": None}) + "\n")
    assert read_rows(path) == [ROW | {"loss": 1, "kl": None}]
    assert not series(read_rows(path), "reward/mean")


@pytest.mark.parametrize("damage", [{"attempt": 5}, {"set": 5}, {"attempt": None}, {"set": ["a"]}])
def test_a_name_that_is_no_text_is_absent(path: Path, damage: dict[str, object]) -> None:
    path.write_text(json.dumps(ROW | damage) + "\n")
    assert read_rows(path) == [ROW]


@pytest.mark.parametrize("damage", [{"file": 5}, {"written": "x"}, {"done": None}, {"of": 1.5}])
def test_a_row_with_a_damaged_field_of_its_job_file_has_none_of_them(path: Path, damage: dict[str, object]) -> None:
    path.write_text(f"{json.dumps(ROW | FILE)}\n{json.dumps(ROW | FILE | damage)}\n")
    assert read_rows(path) == [ROW | FILE, ROW]
    assert roll_back_file(path, FileStep("a", 1, 0, 4)) == 1


def test_closing_closes_every_sink(path: Path) -> None:
    kept = Kept()
    MetricSinks(path, "12-0", [kept]).close()
    assert kept.closed


def test_the_console_says_each_row_with_the_numbers_that_it_has(caplog: pytest.LogCaptureFixture) -> None:
    console = Console()
    with caplog.at_level(logging.INFO, "pipeline.run.metrics_log"):
        console.write({"kind": "train", "job": "rl", "step": 10, "reward/mean": 0.25})
        console.write({"kind": "eval", "job": "rl", "step": 9, "eval/accuracy": 0.5})
    assert caplog.messages == ["rl step 10 reward/mean=0.25", "rl step 9 eval/accuracy=0.5"]
