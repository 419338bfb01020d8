"""Recorded groups: read back as they were trained, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pyarrow import concat_tables, parquet

from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError
from pipeline.rollout.recorded_groups import RecordedRun, group_of_records, replayed_run
from pipeline.rollout.sample_store import records_of_group, segments, table_of
from pipeline.train.loop.batch_metrics import batch_metrics
from pipeline.transport.sample_records import PreparedGroup
from tests.fakes.run_directory import FakeRun
from tests.support.runs.recorded import PROMPTS, STEPS, make_group, write_recorded


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to import Arrow."""
    monkeypatch.setattr("pipeline.rollout.sample_store.CLOSE_SECONDS", 60.0)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return write_recorded(tmp_path / "recorded")


def replay_of(run: FakeRun, **changed: Any) -> RunConfig:
    tree = run.config.model_dump(mode="json") | {"name": "replay", "replay": "recorded"}
    for section, keys in changed.items():
        tree[section] = tree[section] | keys if isinstance(keys, dict) else keys
    return load_config(tree)


def test_a_group_is_read_back_with_all_that_is_trained() -> None:
    group = make_group(7, seed=7, version=3)
    records = records_of_group(PreparedGroup(group=group, advantages=(0.0,) * 4), "sums", "group_std")
    back = group_of_records(table_of(records).to_pylist(), "sums")
    assert back.fingerprint() == group.fingerprint()
    assert (back.position, back.prompt, back.failures, back.versions) == (7, 7, ("reward raised",), (3, 4))
    for mine, theirs in zip(back.samples, group.samples, strict=True):
        mine.check()
        assert mine.metrics == theirs.metrics
        for one, other in zip(mine.rows(), theirs.rows(), strict=True):
            assert all((a == b).all() for a, b in zip(one.stored(), other.stored(), strict=True))


def test_a_group_of_a_mix_has_its_label_so_that_a_replay_has_the_metrics_of_each_task() -> None:
    groups = [structs.replace(make_group(7, seed=7, version=3), task=label) for label in ("sums", "")]
    back = []
    for group in groups:
        records = records_of_group(PreparedGroup(group=group, advantages=(0.0,) * 4), "mix", "group_std")
        back.append(group_of_records(table_of(records).to_pylist(), "mix"))
    assert [group.task for group in back] == ["sums", ""]
    metrics = batch_metrics([PreparedGroup(group=group, advantages=(0.0,) * 3) for group in back], 4)
    assert metrics["reward/sums"] == pytest.approx(metrics["reward/mean"])


def test_batches_have_the_trained_samplings_in_the_recorded_order(run: FakeRun) -> None:
    recorded = RecordedRun(replayed_run(replay_of(run)))
    recorded.check(replay_of(run))
    assert recorded.steps == STEPS
    batches = [[group.position for group in recorded.batch(step)] for step in range(STEPS)]
    assert batches == [[0, 2], [1, 3], [5, 6], [7, 8], [9, 10], [11, 12]]
    assert len(batches[0]) == PROMPTS
    assert [line.position for line in recorded.set_aside(2)] == [4]
    (again, _) = recorded.batch(2)
    assert again.fingerprint() == make_group(5, seed=5, version=1).fingerprint() != make_group(5, 105, 1).fingerprint()


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        RecordedRun(replayed_run(config)).check(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_run_that_is_not_there_and_the_replay_itself_are_refused(run: FakeRun) -> None:
    assert "expected a run directory, or a name below" in refusal(replay_of(run, replay="nothing"))
    assert "expected another run" in refusal(replay_of(run, name="recorded"))


def test_a_run_without_a_sample_store_or_without_a_batch_is_refused(run: FakeRun) -> None:
    FakeRun(run.root, load_config(run.config.model_dump(mode="json") | {"rollout": {"sample_store_bytes": 0}}))
    assert "a run that stored its samples; it had rollout.sample_store_bytes=0" in refusal(replay_of(run))
    FakeRun(run.root, run.config)
    run.paths.ledger.unlink()
    assert "expected a run whose ledger.jsonl has a batch" in refusal(replay_of(run))


def test_missing_samples_are_named_with_the_steps_that_are_whole(run: FakeRun) -> None:
    (file,) = segments(run.paths.rollouts / "train")
    table = parquet.read_table(file)
    parquet.write_table(table.filter([row != 9 for row in table["position"].to_pylist()]), file)
    text = refusal(replay_of(run))
    assert "those of position 9, trained in step 5, are missing" in text
    assert "training.steps=4 replays the steps before it" in text
    RecordedRun(run.paths).check(replay_of(run, training={"steps": 4}))
    file.write_bytes(b"torn")
    assert "those of position 0, trained in step 1, are missing; record it again" in refusal(replay_of(run))


def test_a_group_that_was_stored_twice_is_read_once(run: FakeRun) -> None:
    (file,) = segments(run.paths.rollouts / "train")
    table = parquet.read_table(file)
    parquet.write_table(concat_tables([table, table]), file)
    for group in RecordedRun(run.paths).batch(0):
        assert group.fingerprint() == make_group(group.position, group.position, version=0).fingerprint()


def test_samples_that_are_not_the_trained_ones_are_refused(run: FakeRun) -> None:
    (file,) = segments(run.paths.rollouts / "train")
    table = parquet.read_table(file)
    rows = table.to_pylist()
    next(row for row in rows if row["position"] == 3)["reward"] = 7.0
    parquet.write_table(table.from_pylist(rows, schema=table.schema), file)
    with pytest.raises(ConfigError, match="position 3, trained in step 2, are not the trained ones"):
        RecordedRun(run.paths).batch(1)


def test_a_damaged_line_of_the_ledger_costs_its_position(run: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    lines = run.paths.ledger.read_bytes().splitlines(keepends=True)
    filtered = next(index for index, line in enumerate(lines) if b'"position":4,' in line)
    lines[filtered] = b'{"position":4,"outco' + bytes(20) + b"\n"
    run.paths.ledger.write_bytes(b"".join(lines))
    RecordedRun(run.paths).check(replay_of(run))
    assert [record.message for record in caplog.records] == [
        f"{run.paths.ledger}: 1 lines cannot be read and are left out"
    ]
    trained = next(index for index, line in enumerate(lines) if b'"position":9,' in line)
    lines[trained] = b"\xff" + lines[trained]
    run.paths.ledger.write_bytes(b"".join(lines))
    text = refusal(replay_of(run))
    assert "ledger.jsonl has 1 of the 2 positions of step 5; training.steps=4 replays the steps before it" in text
    RecordedRun(run.paths).check(replay_of(run, training={"steps": 4}))


def test_more_steps_than_were_recorded_are_refused(run: FakeRun) -> None:
    assert f"training.steps=7: expected at most {STEPS}" in refusal(replay_of(run, training={"steps": 7}))


def test_other_batches_and_another_temperature_are_refused(run: FakeRun) -> None:
    text = refusal(replay_of(run, training={"prompts_per_step": 4}))
    assert "training.prompts_per_step=4: expected 2, as in the recorded run" in text
    assert "rollout.temperature=0.5" in refusal(replay_of(run, rollout={"temperature": 0.5}))


def test_another_tokenizer_and_another_model_are_refused(run: FakeRun, tmp_path: Path) -> None:
    source, other = Path(run.config.model.path), tmp_path / "other"
    other.mkdir()
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    changed = replay_of(run, model={"path": str(other)})
    RecordedRun(run.paths).check(changed)  # a copy is the same model
    (other / "tokenizer.json").write_text("{}")
    assert "model.path=" in refusal(changed)
    assert "a model with the tokenizer.json of" in refusal(changed)
    (other / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    tree = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(tree | {"hidden_size": 64}))
    assert "a model with the config.json of" in refusal(changed)


def test_a_run_with_a_teacher_or_with_routing_replay_is_refused(run: FakeRun) -> None:
    tree = run.config.model_dump(mode="json")
    FakeRun(run.root, load_config(tree | {"teacher": {"url": "http://127.0.0.1:9", "model": "m"}}))
    assert "expected a run without teacher.url" in refusal(replay_of(run))
    FakeRun(run.root, load_config(tree | {"training": tree["training"] | {"routing_replay": "rollout"}}))
    assert "expected a run without training.routing_replay" in refusal(replay_of(run))
