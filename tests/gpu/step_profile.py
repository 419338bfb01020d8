"""Where a step's time goes: launches, time of the GPU and of the host by phase, from a trace of torch's profiler.

    with phases():
        summary = profile_step(step)              # a step that has been warmed up

A kernel belongs to the innermost phase in which the host launched it, on any thread. GPU busy is the union of kernels
and copies over the wall time of the steps.
"""

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.train.model import model_worker, models
from pipeline.train.model.optimizer import Optimizer
from tests.gpu import plain

PHASES: dict[str, list[tuple[Any, str]]] = {
    "staging": [(model_worker, "collate")],
    "forward": [(model_worker.ModelWorker, "_loss"), (plain, "forward")],
    "LM head": [(models, "head_logprobs")],
    "backward": [(torch.Tensor, "backward")],
    "metrics": [(model_worker, "numbers")],
    "optimizer": [(Optimizer, "step"), (torch.optim.AdamW, "step")],
    "clipping": [(Optimizer, "_global_norm"), (torch.nn.utils, "clip_grad_norm_")],
}
"""Functions by phase; a phase may lie within another."""
HEAD_BACKWARD = "_HeadBackward"
STEPS = 3
LARGEST = 12
_LAUNCHES = ("LaunchKernel", "GraphLaunch")
_WAITS = ("Synchronize", "cudaStreamWaitValue")


class Span(NamedTuple):
    start: float
    end: float
    name: str


@contextmanager
def phases() -> Iterator[None]:
    """Within, the functions of `PHASES` mark their calls in traces."""
    marks = []
    for name, functions in PHASES.items():
        for owner, attribute in functions:
            if hasattr(owner, attribute):
                marks.append(patch.object(owner, attribute, _marked(getattr(owner, attribute), name)))
    for mark in marks:
        mark.start()
    try:
        yield
    finally:
        for mark in reversed(marks):
            mark.stop()


def _marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        with record_function(f"phase: {name}"):
            return function(*given, **named)

    return run


def profile_step(step: Callable[[], object]) -> dict[str, Any]:
    """The summary of `STEPS` steps, for each step."""
    cuda = torch.cuda.is_available()
    step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
        for _ in range(STEPS):
            with record_function("phase: other"):
                step()
                if cuda:
                    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return summarize(events)


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds and counts of a step, by phase."""
    timed = [event for event in events if event.get("ph") == "X"]
    spans = sorted(filter(None, map(_phase, timed)))
    steps = [span for span in spans if span.name == "other"]
    wall = sum(span.end - span.start for span in steps)
    host = [event for event in timed if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {event["args"].get("correlation"): event["ts"] for event in host}
    device = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    gpu, count, kinds = defaultdict[str, float](float), Counter[str](), Counter[str]()
    for event in device:
        phase = innermost(spans, launched.get(event["args"].get("correlation"), event["ts"]))
        gpu[phase] += event["dur"]
        count[phase] += 1
        kinds[event["name"].partition("<")[0][:80]] += event["dur"]
    hosts = _host_times(spans)
    copies = [event for event in device if event["cat"] == "gpu_memcpy"]
    return {
        "wall_ms": wall / STEPS / 1e3,
        "gpu_busy": _union(device) / wall if wall else 0.0,
        "launches": sum(any(word in event["name"] for word in _LAUNCHES) for event in host) / STEPS,
        "waits": sum(any(word in event["name"] for word in _WAITS) for event in host) / STEPS,
        "copies": dict(Counter(event["name"] for event in copies)),
        "copy_ms": sum(event["dur"] for event in copies) / STEPS / 1e3,
        "phases": {
            name: {"host_ms": hosts[name], "gpu_ms": gpu[name] / STEPS / 1e3, "kernels": count[name] / STEPS}
            for name in sorted(hosts.keys() | gpu.keys())
        },
        "kernels_ms": {name: time / STEPS / 1e3 for name, time in kinds.most_common(LARGEST)},
    }


def _phase(event: dict[str, Any]) -> Span | None:
    name, start = event.get("name", ""), event["ts"]
    if event.get("cat") == "user_annotation" and name.startswith("phase: "):
        return Span(start, start + event["dur"], name.removeprefix("phase: "))
    if event.get("cat") == "cpu_op" and name == HEAD_BACKWARD:
        return Span(start, start + event["dur"], "LM head, backward")
    return None


def innermost(spans: list[Span], moment: float) -> str:
    """The phase that began last of those that last at this moment."""
    name = "before and after"
    for span in spans:
        if span.start > moment:
            break
        if moment < span.end:
            name = span.name
    return name


def _host_times(spans: list[Span]) -> dict[str, float]:
    """Milliseconds of a step that the host spends in each phase, without the phases within it."""
    own = defaultdict[str, float](float)
    open_spans: list[Span] = []
    for span in spans:
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        if open_spans:
            own[open_spans[-1].name] -= span.end - span.start
        own[span.name] += span.end - span.start
        open_spans.append(span)
    return {name: time / STEPS / 1e3 for name, time in own.items()}


def _union(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
