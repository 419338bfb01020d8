"""The check of a run finds each kind of damage, and nothing in a sound run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyarrow import concat_tables, parquet

from pipeline.observability.check_command import main
from pipeline.observability.run_check import check_run
from pipeline.rollout.sample_store import SampleStore, records_of_group, segments
from pipeline.run.metrics_log import MetricSinks
from pipeline.transport.ledger import BatchEntry, Ledger
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

STEPS, PROMPTS, LAG = 10, 2, 1
FILTERED = 5
"""A position that no batch had."""
Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to import Arrow."""
    monkeypatch.setattr("pipeline.rollout.sample_store.CLOSE_SECONDS", 60.0)


def arrays(*tokens: int) -> dict[str, bytes]:
    count = len(tokens)
    return {
        "tokens": np.array(tokens, "<i4").tobytes(),
        "sampled": np.array([0] + [1] * (count - 1), "u1").tobytes(),
        "logprobs": np.array([0.0] + [-0.1] * (count - 1), "<f4").tobytes(),
        "version_offsets": np.array([0] * (count - 1) + [1], "u1").tobytes(),
    }


def a_group(position: int, version: int, reward: float = 1 / 3) -> Group:
    """A plain sample and one of two rows."""
    branch = Branch(of=0, shared=1, **arrays(8, position))
    head: dict[str, Any] = {"version_min": version, "version_max": version + 1, "finish": "stop"}
    samples = (
        Sample(**head, **arrays(1, 2, position), reward=reward),
        Sample(**head, **arrays(4, 5), reward=0.0, branches=(branch,)),
    )
    return Group(position=position, prompt=position, samples=samples, failures=("reward raised",))


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A finished run with SFT before RL, a filtered position, an overtaken one, and one that was sampled twice."""
    training = {"steps": STEPS, "prompts_per_step": PROMPTS, "max_lag": LAG, "sft": {"steps": 3}}
    made = FakeRun(tmp_path / "demo", make_config(name="demo", training=training))
    positions = [place for place in range(STEPS * PROMPTS + 1) if place != FILTERED]
    positions[3], positions[4] = positions[4], positions[3]
    ledger = Ledger()
    with SampleStore(made.paths.rollouts / "train", "a-0", 1 << 20) as kept:
        for index, position in enumerate(positions):
            step = index // PROMPTS
            if step == 2 and not ledger.is_done(FILTERED):
                ledger.mark_done(FILTERED, "filtered: zero advantage", step)
            group = a_group(position, max(0, step - 1))
            for one in (a_group(position, 0, reward=9.0), group) if position == 7 else (group,):
                prepared = PreparedGroup(group=one, advantages=(1.0, -1.0))
                kept.add(records_of_group(prepared, "sums", "group_std"))
            entry = BatchEntry(order=index % PROMPTS, versions=group.versions, fingerprint=group.fingerprint())
            ledger.mark_done(position, "trained", step, entry)
    made.paths.ledger.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in ledger.drain_changes()))
    with MetricSinks(made.paths.metrics, "a-0", clock=lambda: 0.0) as sinks:
        for job, steps in (("sft", 3), ("rl", STEPS)):
            for step in range(1, steps + 1):
                sinks.log("train", job, step, {"loss": 1.0})
        sinks.log("eval", "rl", STEPS, {"eval/accuracy": 1.0})
        sinks.log("eval", "rl", STEPS, {"eval/accuracy": 1.0}, eval_set="hard")
    made.finish(STEPS)
    return made


def edit(file: Path, change: Callable[[Lines], Any]) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def of_ledger(run: FakeRun, change: Callable[[Lines], Any]) -> Sequence[str]:
    edit(run.paths.ledger, change)
    return check_run(run.root).problems


def of_metrics(run: FakeRun, change: Callable[[Lines], Any]) -> Sequence[str]:
    edit(run.paths.metrics, change)
    return check_run(run.root).problems


def test_a_sound_run_has_no_problem(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    check = check_run(run.root)
    assert check.problems == ()
    assert (check.steps, check.positions, check.in_flight) == (STEPS, STEPS * PROMPTS + 1, 0)
    assert (check.groups, check.stored, check.is_finished) == (STEPS * PROMPTS, STEPS * PROMPTS, True)
    assert main([f"run={run.root}"]) == 0
    assert capsys.readouterr().out.startswith("sound: 10 RL steps, 21 positions done, 0 in flight; the stored samples")


def test_the_command_names_each_problem_and_exits_with_1(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run.paths.ledger, lambda lines: lines.append(lines[0]))
    assert main([f"run={run.root}"]) == 1
    assert "problem: position 0 is done 2 times, at steps 0, 0\n" in capsys.readouterr().out
    assert main(["run=nothing"]) == 2


def test_a_lost_position_is_found(run: FakeRun) -> None:
    """All batches are full: the positions after it moved up."""

    def lose(lines: Lines) -> None:
        for line in lines:
            line["position"] += line["position"] >= 2

    (problem,) = [text for text in of_ledger(run, lose) if "lost" in text]
    assert problem == "positions 2 are lost: issued over 6 steps before the end, never done"


def test_positions_in_flight_at_the_end_are_none(run: FakeRun) -> None:
    """Positions 21 and 22 overtook 19 and 20."""

    def overtake(lines: Lines) -> None:
        for line in lines[-2:]:
            line["position"] += 2

    edit(run.paths.ledger, overtake)
    check = check_run(run.root)
    assert check.in_flight == 2
    assert not any("lost" in problem or "admits" in problem for problem in check.problems)


def test_more_unfinished_positions_than_the_gate_admits_are_found(run: FakeRun) -> None:
    problems = of_ledger(run, lambda lines: lines[-1].update(position=30))
    assert "10 positions are issued and not done; the gate admits 4" in problems


def test_a_position_that_is_trained_twice_is_found(run: FakeRun) -> None:
    problems = of_ledger(run, lambda lines: lines[-1].update(position=3))
    assert "position 3 is done 2 times, at steps 2, 9" in problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines.insert(2, lines.pop(3)), "the batch of step 2 has groups 1, 0, not 0 to 1 in order"),
        (lambda lines: lines.insert(0, lines.pop()), "ledger.jsonl has its steps out of order"),
        (lambda lines: lines.pop(0), "the batch of step 1 has groups 1, not 0 to 1 in order"),
        (lambda lines: [lines.pop(0) for _ in "ab"], "ledger.jsonl has no batch of steps 1"),
        (lambda lines: [lines.pop() for _ in "ab"], "ledger.jsonl ends with step 9, and metrics.jsonl with step 10"),
    ],
)
def test_another_order_and_a_missing_batch_are_found(
    run: FakeRun, change: Callable[[Lines], Any], problem: str
) -> None:
    assert problem in of_ledger(run, change)


def test_a_group_that_is_too_old_is_found(run: FakeRun) -> None:
    problems = of_ledger(run, lambda lines: lines[-1].update(versions=[7, 8]))
    assert "position 20 is 2 steps old at step 10; training.max_lag=1" in problems


def test_with_masked_tokens_only_a_group_without_a_fresh_one_is_too_old(run: FakeRun) -> None:
    training = run.config.training.model_copy(update={"stale": "mask"})
    masked = FakeRun(run.root, run.config.model_copy(update={"training": training}))
    assert "old at" not in "".join(of_ledger(masked, lambda lines: lines[-1].update(versions=[7, 8])))
    problems = of_ledger(masked, lambda lines: lines[-1].update(versions=[7, 7]))
    assert "position 20 is 2 steps old at step 10; training.max_lag=1" in problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines.insert(5, lines[5]), "metrics.jsonl has 2 rows for train rl step 3"),
        (lambda lines: lines.append(lines[-1]), "metrics.jsonl has 2 rows for eval hard step 10"),
        (lambda lines: lines.pop(1), "metrics.jsonl has no row for sft steps 2"),
        (lambda lines: lines.insert(5, lines.pop(6)), "metrics.jsonl has its rl steps out of order"),
        (lambda lines: lines.pop(12), "ledger.jsonl ends with step 10, and metrics.jsonl with step 9"),
        (lambda lines: lines.pop(12), "the run finished with step 10, and the last row of metrics.jsonl has step 9"),
    ],
)
def test_a_doubled_and_a_missing_row_of_metrics_are_found(
    run: FakeRun, change: Callable[[Lines], Any], problem: str
) -> None:
    assert problem in of_metrics(run, change)


def test_a_damaged_line_is_found_and_an_incomplete_one_is_not(run: FakeRun) -> None:
    with run.paths.ledger.open("a") as file:
        file.write('{"position": 4')
    assert not check_run(run.root).problems
    with run.paths.ledger.open("a") as file:
        file.write("\n")
    assert check_run(run.root).problems == ("line 22 of ledger.jsonl is damaged",)


def test_samples_that_are_not_the_trained_ones_are_found(run: FakeRun) -> None:
    (file,) = segments(run.paths.rollouts / "train")
    table = parquet.read_table(file)
    rows = table.to_pylist()
    next(row for row in rows if row["position"] == 12)["tokens"][1] += 1
    parquet.write_table(table.from_pylist(rows, schema=table.schema), file)
    assert check_run(run.root).problems == ("the stored samples of position 12 are not those that were trained",)
    problems = of_ledger(run, lambda lines: lines[0].update(versions=[1, 1]))
    assert "position 0 has a token of a version outside of 1 to 1" in problems


def test_a_group_that_was_stored_twice_is_no_problem(run: FakeRun) -> None:
    """An actor that is restarted may send a finished group again; the trainer takes it once."""
    (file,) = segments(run.paths.rollouts / "train")
    table = parquet.read_table(file)
    first = table.filter([position == 0 for position in table["position"].to_pylist()])
    parquet.write_table(concat_tables([first, table]), file)
    checked = check_run(run.root)
    assert (checked.problems, checked.stored) == ((), checked.groups)


def test_a_run_without_stored_samples_is_checked_without_them(run: FakeRun) -> None:
    (file,) = segments(run.paths.rollouts / "train")
    file.write_bytes(b"torn")
    check = check_run(run.root)
    assert (check.problems, check.stored, check.groups) == ((), 0, 20)


def test_an_unfinished_run_is_checked_up_to_its_last_checkpoint(run: FakeRun) -> None:
    run.paths.finished.unlink()
    assert not of_ledger(run, lambda lines: [lines.pop() for _ in "abcd"])
    problems = of_metrics(run, lambda lines: [lines.pop() for _ in "abcdef"])
    assert problems == ("ledger.jsonl ends with step 8, and metrics.jsonl with step 6",)


@pytest.mark.parametrize("line", ['{"kind": "train"}', '{"kind": "train", "job": "rl", "step": "3", "time": 1.0}'])
def test_a_line_of_metrics_without_a_step_is_damaged(run: FakeRun, line: str) -> None:
    with run.paths.metrics.open("a") as file:
        file.write(f"{line}\n")
    count = len(run.paths.metrics.read_text().splitlines())
    assert check_run(run.root).problems == (f"line {count} of metrics.jsonl is damaged",)
