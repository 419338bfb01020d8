"""The trace of one process: written by torch's profiler, bounded, and never the reason why a step fails."""

import gzip
import json
import logging
import pickle
from pathlib import Path

import pytest
import torch

from pipeline.train.controller.rank_traces import RankTraces

LIMIT = 1 << 24


def traced(traces: RankTraces, stem: Path, limit: int = LIMIT) -> list[Path]:
    """A step that multiplies two matrices."""
    traces.begin(profiled=True, memory=False)
    torch.ones(3, 5) @ torch.ones(5, 7)
    return traces.end(stem, limit, snapshot=False)


def test_a_trace_has_the_operations_of_its_step_with_their_shapes(tmp_path: Path) -> None:
    traces = RankTraces()
    torch.ones(2, 2).cos()  # before the step
    (file,) = traced(traces, tmp_path / "traces" / "rl-5.rank-0")
    torch.ones(2, 2).sin()  # after the step
    assert file == tmp_path / "traces" / "rl-5.rank-0.json.gz"
    events = {event["name"]: event for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert events["aten::mm"]["args"]["Input Dims"] == [[3, 5], [5, 7]]
    assert not {"aten::cos", "aten::sin"} & set(events)


def test_each_step_of_a_window_has_a_trace(tmp_path: Path) -> None:
    traces = RankTraces()
    for step in (5, 6):
        traced(traces, tmp_path / f"rl-{step}.rank-0")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rl-5.rank-0.json.gz", "rl-6.rank-0.json.gz"]


def test_traces_never_exceed_their_limit_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traces = RankTraces()
    (first,) = traced(traces, tmp_path / "rl-5.rank-0")
    limit = first.stat().st_size + 100
    assert traced(traces, tmp_path / "rl-6.rank-0", limit) == []
    assert "rl-6.rank-0.json.gz is removed and nothing more is recorded" in caplog.text
    assert f"exceed debug.trace_bytes={limit}" in caplog.text
    assert traced(traces, tmp_path / "rl-7.rank-0", limit=1 << 30) == []
    assert list(tmp_path.iterdir()) == [first]


def test_a_disk_that_refuses_a_trace_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        assert traced(RankTraces(), tmp_path / "traces" / "rl-5.rank-0") == []
    assert "rl-5.rank-0.json.gz is not written" in caplog.text


def test_nothing_is_written_for_a_step_that_is_not_traced(tmp_path: Path) -> None:
    traces = RankTraces()
    traces.begin(profiled=False, memory=False)
    assert traces.end(tmp_path / "rl-4.rank-0", LIMIT, snapshot=False) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_snapshot_has_the_allocations_of_all_steps_of_its_window_with_their_stacks(tmp_path: Path) -> None:
    traces, held = RankTraces(), []
    for step, last in ((5, False), (6, True)):
        traces.begin(profiled=step == 5, memory=True)
        held.append(torch.ones(step << 20, device="cuda"))
        files = traces.end(tmp_path / f"rl-{step}.rank-0", LIMIT, snapshot=last)
    assert files == [tmp_path / "rl-6.rank-0.memory.pickle"]
    events, *_ = pickle.loads(files[0].read_bytes())["device_traces"]  # of the first GPU
    allocations = {event["size"]: event for event in events if event["action"] == "alloc"}
    assert {4 * (5 << 20), 4 * (6 << 20)} <= set(allocations)
    assert any(frame["filename"] == __file__ for frame in allocations[4 * (6 << 20)]["frames"])
    trace = json.loads(gzip.decompress((tmp_path / "rl-5.rank-0.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in trace)
    recorded = len(torch.cuda.memory._snapshot()["device_traces"][0])
    torch.ones(7 << 20, device="cuda")  # after the window
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == recorded
