"""Samples that are kept: what is written, what stays, and that nobody waits."""

import logging
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from pipeline.checkpoints import Fence
from pipeline.rollout import sample_store as module
from pipeline.rollout.sample_store import (
    COLUMNS,
    SampleRecord,
    SampleStore,
    delete_oldest,
    records_of_evaluation,
    records_of_group,
    segments,
    segments_over,
)
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to import Arrow."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 60.0)


def a_sample(reward: float = 1.0, **more: Any) -> Sample:
    values = {
        "tokens": np.array([1, 2, 3], "<i4").tobytes(),
        "sampled": np.array([0, 1, 1], "u1").tobytes(),
        "logprobs": np.array([0, -0.5, -0.25], "<f4").tobytes(),
        "version_min": 3,
        "version_max": 4,
        "finish": "stop",
        "metrics": {"rewards/exact": reward},
    }
    return Sample(**{**values, "reward": reward, **more})


def a_group(position: int = 7, *, outcome: str = "train", failures: tuple[str, ...] = ("reward raised: x",)) -> Any:
    group = Group(position=position, prompt=2, samples=(a_sample(1.0), a_sample(0.0)), failures=failures)
    return PreparedGroup(group=group, advantages=(0.5, -0.5), outcome=outcome)


def written(folder: Path) -> list[SampleRecord]:
    return [row for file in segments(folder) for row in parquet.read_table(file).to_pylist()]


def test_an_attempt_that_was_replaced_adds_and_removes_no_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes until then. That both may write at once, which needs more than the bound, is what the fence is for."""
    folder, root = tmp_path / "rollouts", str(tmp_path / "checkpoints")
    old, new = Fence(root, "7-0"), Fence(root, "7-1")
    old.claim("7")
    with SampleStore(folder, "7-0", 1 << 20, old.check) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group_std"))
    assert len(segments(folder)) == 1
    new.claim("7")
    part = folder / ".00000000000000000009-7-1.parquet.part"
    part.write_bytes(bytes(100))
    with caplog.at_level(logging.WARNING), SampleStore(folder, "7-0", 1, old.check) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group_std"))
    assert part.exists()
    assert {row["attempt"] for row in written(folder)} == {"7-0"}
    assert len(segments(folder)) == 1
    assert "attempt 7-1 has taken over" in caplog.text


def test_an_attempt_that_is_replaced_while_it_writes_leaves_no_segment(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    old, checks = Fence(root, "7-0"), list[int]()
    old.claim("7")

    def check() -> None:
        checks.append(1)
        if len(checks) == 2:
            Fence(root, "7-1").claim("7")
        old.check()

    with SampleStore(tmp_path, "7-0", 1 << 20, check) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group_std"))
    assert not segments(tmp_path)
    assert not list(tmp_path.glob(".*.part"))


def test_what_a_killed_attempt_left_half_written_is_removed(tmp_path: Path) -> None:
    part = tmp_path / ".00000000000000000001-a-0.parquet.part"
    part.write_bytes(bytes(100))
    with SampleStore(tmp_path, "a-1", 1 << 20) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group_std"))
    assert not part.exists()
    assert len(written(tmp_path)) == 3


def test_a_group_is_kept_with_its_tokens_advantages_and_failures(tmp_path: Path) -> None:
    with SampleStore(tmp_path, "a-0", 1 << 20) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group_std"))
    best, worst, failed = written(tmp_path)
    assert (best["tokens"], best["mask"], best["logprobs"]) == ([1, 2, 3], [0, 1, 1], [0.0, -0.5, -0.25])
    assert (best["reward"], best["advantage"], worst["reward"], worst["advantage"]) == (1.0, 0.5, 0.0, -0.5)
    assert (best["attempt"], best["task"], best["position"], best["prompt"]) == ("a-0", "countdown", 7, 2)
    assert (best["length"], best["sampled"], best["version_min"], best["version_max"]) == (3, 2, 3, 4)
    assert dict(best["metrics"]) == {"rewards/exact": 1.0}
    assert best["eval_set"] is None
    assert [row["sample"] for row in (best, worst, failed)] == [0, 1, 2]
    assert (failed["failure"], failed["reward"], failed["tokens"]) == ("reward raised: x", None, None)
    assert list(best) == list(COLUMNS)


def test_all_rows_of_an_episode_are_kept_and_each_sampled_token_counts_once(tmp_path: Path) -> None:
    other = {
        "tokens": np.array([7, 8], "<i4").tobytes(),
        "sampled": np.array([0, 1], "u1").tobytes(),
        "logprobs": np.array([0, -0.75], "<f4").tobytes(),
    }
    branched = a_sample(branches=(Branch(of=0, shared=2, **other),))
    with SampleStore(tmp_path, "a-0", 1 << 20) as kept:
        kept.add(records_of_evaluation([[branched]], "sums", "hard"))
    (row,) = written(tmp_path)
    assert (row["row_lengths"], row["length"], row["sampled"]) == ([3, 4], 7, 3)
    assert row["tokens"] == [1, 2, 3, 1, 2, 7, 8]
    assert row["mask"] == [0, 1, 1, 0, 0, 0, 1]
    assert row["logprobs"] == [0.0, -0.5, -0.25, 0.0, 0.0, 0.0, -0.75]


def test_advantages_that_the_trainer_makes_are_not_kept_as_if_they_were_known(tmp_path: Path) -> None:
    rows = records_of_group(a_group(), "countdown", "gae")
    assert [row.get("advantage") for row in rows] == [None, None, None]


def test_a_group_that_is_not_trained_is_kept_with_its_outcome() -> None:
    group = PreparedGroup(group=a_group().group, outcome="filtered: zero advantage")
    assert {row["outcome"] for row in records_of_group(group, "countdown", "group")} == {"filtered: zero advantage"}


def test_an_evaluation_is_kept_by_prompt_and_sample(tmp_path: Path) -> None:
    with SampleStore(tmp_path, "a-0", 1 << 20) as kept:
        kept.add(records_of_evaluation([[a_sample(), "too late"], [a_sample(0.0), a_sample()]], "sums", "hard"))
    rows = written(tmp_path)
    assert [(row["position"], row["sample"], row["reward"]) for row in rows] == [
        (0, 0, 1.0),
        (0, 1, None),
        (1, 0, 0.0),
        (1, 1, 1.0),
    ]
    assert {row["eval_set"] for row in rows} == {"hard"}


def test_a_bound_of_0_keeps_nothing(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "none", "a-0", 0) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group"))
    assert not (tmp_path / "none").exists()


def test_samples_that_come_faster_than_the_disk_takes_them_are_left_out_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = SampleStore(tmp_path, "a-0", 1 << 20)  # its thread has not begun, as if the disk hung
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    full = SampleStore(tmp_path, "a-0", 1 << 20)
    rows = records_of_group(a_group(), "countdown", "group")
    for _ in range(6):
        full.add(list(rows))
        kept.add(list(rows))
    assert (full.dropped, kept.dropped) == (2 * len(rows), 0)


def test_a_disk_that_fails_costs_samples_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING), SampleStore(tmp_path / "file", "a-0", 1 << 20) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group"))
    assert kept.dropped == 3
    assert len([record for record in caplog.records if "samples are not stored" in record.message]) == 1


def test_a_sample_that_does_not_fit_its_columns_costs_itself_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = PreparedGroup(group=Group(position=8, prompt=2, samples=(a_sample(turns=1 << 40),)), advantages=(0.0,))
    with caplog.at_level(logging.WARNING), SampleStore(tmp_path, "a-0", 1 << 20) as kept:
        for group in (a_group(7), odd, a_group(9)):
            kept.add(records_of_group(group, "countdown", "group"))
    assert [row["position"] for row in written(tmp_path)] == [7] * 3 + [9] * 3
    assert kept.dropped == 1
    assert len([record for record in caplog.records if "samples are not stored" in record.message]) == 1


def test_what_was_handed_over_is_on_disk_before_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_SECONDS", 0.1)
    with SampleStore(tmp_path, "a-0", 1 << 20) as kept:
        kept.add(records_of_group(a_group(), "countdown", "group"))
        deadline = time.monotonic() + 30
        while not segments(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(written(tmp_path)) == 3


def test_what_is_handed_over_at_once_is_cut_into_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    outcomes = [[a_sample(float(place))] for place in range(20)]
    with SampleStore(tmp_path, "a-0", 1 << 20) as kept:
        kept.add(records_of_evaluation(outcomes, "sums", "hard"))
    assert len(segments(tmp_path)) == 4
    assert [row["reward"] for row in written(tmp_path)] == list(range(20))


def test_all_segments_together_stay_below_the_bound(tmp_path: Path) -> None:
    bound = 60_000
    for position in range(30):
        with SampleStore(tmp_path, "a-0", bound) as kept:
            kept.add(records_of_group(a_group(position), "countdown", "group"))
    sizes = [file.stat().st_size for file in segments(tmp_path)]
    assert sum(sizes) <= bound
    assert len(sizes) > 3
    positions = {row["position"] for row in written(tmp_path)}
    assert {0, 29} <= positions


def test_a_segment_that_another_attempt_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0.parquet", "1.parquet"):
        (tmp_path / name).write_bytes(bytes(10))
    listed = [*segments(tmp_path), tmp_path / "2.parquet"]
    monkeypatch.setattr(module, "segments", lambda folder: listed)
    delete_oldest(tmp_path, 10)
    assert [file.name for file in tmp_path.iterdir()] == ["1.parquet"]


def test_beyond_the_bound_the_newer_half_stays_and_of_the_older_one_evenly_fewer() -> None:
    left = [Path(f"{place:03}") for place in range(200)]
    for _ in range(3):  # as it goes on, one after the other
        gone = set(segments_over(dict.fromkeys(left, 10), 400))
        left = [file for file in left if file not in gone]
    assert len(left) == 40
    places = [int(file.name) for file in left]
    assert places[-20:] == list(range(180, 200)), "the newest half is whole"
    assert places[0] == 0
    gaps = [after - before for before, after in pairwise(places[:21])]
    assert max(gaps) <= 4 * min(gaps)


def test_one_segment_stays_however_large_it_is() -> None:
    assert segments_over({Path("0"): 10, Path("1"): 10}, 1) == [Path("0")]
