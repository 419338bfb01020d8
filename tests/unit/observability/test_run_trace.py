"""The trace of a run: the Chrome trace event format, and spans that are disjoint or nested."""

import json
from itertools import groupby
from typing import Any

import pytest

from pipeline.observability import trace_command
from pipeline.run.metrics_log import MetricSinks
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun


def check_format(events: list[dict[str, Any]]) -> None:
    """Raise unless every event has its fields, every thread a name, and spans of a thread do not overlap partially."""
    assert all(isinstance(event[key], int) and event[key] >= 0 for event in events for key in ("ts", "pid", "tid"))
    assert {event["ph"] for event in events} <= {"M", "X", "i"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} == {e["pid"] for e in events if e["name"] == "process_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} <= threads
    spans = sorted(((event["pid"], event["tid"]), event["ts"], -event["dur"]) for event in events if event["ph"] == "X")
    for _, group in groupby(spans, key=lambda span: span[0]):
        opened: list[int] = []
        for _, begin, negative in group:
            while opened and opened[-1] <= begin:
                opened.pop()
            assert not opened or begin - negative <= opened[-1]
            opened.append(begin - negative)


def test_steps_are_spans_with_their_waits_inside(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path / "run", make_config())
    run.attempt("7-0").paths.root.mkdir(parents=True, exist_ok=True)
    times = iter((100.0, 103.0, 104.5))
    with MetricSinks(run.paths.metrics, "7-0", clock=lambda: next(times)) as metrics:
        parts = {"seconds/step": 4.0, "seconds/data": 1.0, "seconds/train": 2.0, "sync/seconds": 0.5}
        metrics.log("train", "rl", 1, parts)
        metrics.log("train", "rl", 2, parts)
        metrics.log("eval", "rl", 2, {"eval/seconds": 2.0})
    assert trace_command.main([f"run={run.root}", f"trace={tmp_path}/out.json"]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    check_format(events)
    spans = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans[:4] == [
        ("rl step 1", 0, 4_000_000),
        ("wait for groups", 0, 1_000_000),
        ("train", 1_000_000, 2_000_000),
        ("rl step 2", 4_000_000, 3_000_000),  # cut: it cannot begin before the first has ended
    ]
    assert ("evaluation 2", 6_500_000, 2_000_000) in spans
