"""A disturbed run compared with an undisturbed one, from invented run directories."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from pyarrow import concat_tables, parquet

from pipeline.errors import ConfigError
from pipeline.observability.goodput_comparison import compare, lost_positions, rl_rows, sampled_tokens, tables
from pipeline.observability.goodput_section import steps_picture
from pipeline.rollout.sample_store import segments
from pipeline.run.metrics_log import MetricSinks, roll_back
from tests.fakes.configs import make_config
from tests.fakes.run_directory import BEGAN, FakeRun
from tests.support.runs.recorded import make_group, write_recorded

PROMPTS = 2


def make_run(root: Path, *, preempted: bool) -> FakeRun:
    """A run of six steps of 10 seconds. If preempted: after step 4, its next attempt trains from step 3 on."""
    run = FakeRun(root, make_config(training={"steps": 6, "prompts_per_step": PROMPTS, "max_lag": 0}))
    train(run, "7-0", 0, range(1, 5 if preempted else 7))
    if preempted:
        run.now += 30
        train(run, "7-1", 2, range(3, 7))
    return run


def train(run: FakeRun, name: str, done: int, steps: range) -> None:
    attempt = run.attempt(name)
    attempt.role("trainer.0", 0, "starting")
    roll_back(run.paths.metrics, "rl", done, aside=attempt.paths.dropped(0))
    lines = run.paths.ledger.read_bytes().splitlines(keepends=True) if done else []
    run.paths.ledger.write_bytes(b"".join(lines[: done * PROMPTS]))
    start = {"start/restore_seconds": 2.0, "start/begin_seconds": 3.0}
    with MetricSinks(run.paths.metrics, name, clock=lambda: run.now) as sinks:
        for step in steps:
            run.now += 10
            sinks.log("train", "rl", step, {"seconds/step": 8.0, "seconds/data": 1.0} | start)
            start = {}
            with run.paths.ledger.open("ab") as ledger:
                for position in range((step - 1) * PROMPTS, step * PROMPTS):
                    line = {"position": position, "outcome": "trained", "step": step}
                    ledger.write(msgspec.json.encode(line) + b"\n")


def test_a_line_that_a_killed_trainer_did_not_complete_is_no_line(tmp_path: Path) -> None:
    base, other = make_run(tmp_path / "a", preempted=False), make_run(tmp_path / "b", preempted=True)
    whole = compare(base.root, other.root)
    with other.paths.ledger.open("ab") as ledger:
        ledger.write(b'{"position": 12, "outc')
    assert compare(base.root, other.root) == whole


def test_the_ratio_is_of_useful_steps_per_hour_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    base, other = make_run(tmp_path / "a", preempted=False), make_run(tmp_path / "b", preempted=True)
    result = compare(base.root, other.root)
    assert (result.undisturbed.seconds, result.undisturbed.steps_per_hour) == (50, 360)
    # Two of four steps are trained again, and 30 seconds pass between the attempts.
    assert (result.disturbed.steps, result.disturbed.seconds) == (6, 100)
    assert result.ratio == 0.5
    assert (result.disturbed.prompts_lost, result.disturbed.trained_twice, result.disturbed.tokens) == (0, 0, 0)
    (outage,) = result.outages
    assert (outage.what, outage.at, outage.gap) == ("attempt 7-0 ended", 40, 40)
    assert outage.seconds == {"retrained": 20, "requeue": 27, "restore": 2, "weights": 3, "batch": 1}
    text = tables(result)
    assert "| of the undisturbed run | 1 | 0.50 |" in text
    assert "| attempt 7-0 ended | 40 s | 40.0 |" in text
    ElementTree.fromstring(steps_picture(rl_rows(base.root), rl_rows(other.root), [BEGAN + 40]))


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    base = make_run(tmp_path / "a", preempted=False)
    with pytest.raises(ConfigError, match="two RL steps"):
        compare(base.root, FakeRun(tmp_path / "b").root)


def test_a_prompt_is_lost_if_too_many_later_ones_are_done() -> None:
    assert lost_positions(set(), 2) == []
    assert lost_positions({0, 1, 3, 4}, 2) == []
    assert lost_positions({0, 1, 3, 4, 5}, 2) == [2]


def test_a_prompt_that_the_final_model_was_trained_on_twice_is_counted(tmp_path: Path) -> None:
    base, other = make_run(tmp_path / "a", preempted=False), make_run(tmp_path / "b", preempted=False)
    with other.paths.ledger.open("ab") as ledger:
        ledger.write(msgspec.json.encode({"position": 3, "outcome": "trained", "step": 6}) + b"\n")
    assert compare(base.root, other.root).disturbed.trained_twice == 1


def test_tokens_are_sampled_again_only_where_another_sampling_of_the_position_follows(tmp_path: Path) -> None:
    folder = write_recorded(tmp_path / "r").paths.rollouts / "train"
    first = [make_group(5, 105, version=1), make_group(8, 108, version=2)]  # those that were not trained
    again = sum(int(row.sampled.sum()) for group in first for sample in group.samples for row in sample.rows())
    once = sampled_tokens(folder)
    assert once[1] == again
    (file,) = segments(folder)
    table = parquet.read_table(file)
    parquet.write_table(concat_tables([table, table]), file)
    assert sampled_tokens(folder) == once, "stored twice, sampled once"
