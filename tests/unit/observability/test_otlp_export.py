"""The spans of a run as a collector of OpenTelemetry receives them, from the real exporter over HTTP."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pipeline.observability import otlp_export, trace_command
from pipeline.run.metrics_log import MetricSinks
from tests.fakes.run_directory import BEGAN, FakeRun


class Collector(ThreadingHTTPServer):
    """A collector that keeps what it accepts; `code` is its answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code = 200
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Any]:
        scopes = [scope for request in self.requests for each in request.resource_spans for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces" and self.server.code == 200:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
            self.server.headers.append(dict(self.headers))
        self.send_response(self.server.code if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A run of two steps, whose trainer is killed after them."""
    run = FakeRun(tmp_path / "run")
    attempt = run.attempt("7-0")
    attempt.meet()
    attempt.role("trainer.0", 1, "ready")
    times = iter((BEGAN + 6, BEGAN + 10))
    with MetricSinks(run.paths.metrics, "7-0", clock=lambda: next(times)) as metrics:
        parts = {"seconds/step": 4.0, "seconds/data": 1.0, "seconds/train": 2.0, "loss": 0.5}
        metrics.log("train", "rl", 1, parts)
        metrics.log("train", "rl", 2, parts)
    run.now += 11
    attempt.fail("trainer.0", 1)
    return run


def send(run: FakeRun, url: str, *others: str) -> int:
    return trace_command.main([f"run={run.root}", f"otlp={url}", *others])


def test_an_attempt_is_a_trace_with_its_steps_their_parts_and_its_events(
    run: FakeRun, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send(run, collector.url) == 0
    spans = {span.name: span for span in collector.spans}
    assert capsys.readouterr().out == f"{len(collector.spans)} spans sent\n"
    assert not (run.root / "trace.json").exists()
    root = spans["attempt 7-0"]
    assert len({span.trace_id for span in collector.spans}) == 1
    assert spans["rl step 1"].parent_span_id == spans["rl step 2"].parent_span_id == root.span_id
    assert {span.parent_span_id for span in collector.spans if span.name == "train"} == {
        spans["rl step 1"].span_id,
        spans["rl step 2"].span_id,
    }
    step = spans["rl step 1"]
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == ((BEGAN + 2) * 1e9, (BEGAN + 6) * 1e9)
    values = {attribute.key: attribute.value for attribute in step.attributes}
    assert (values["rollcall.track"].string_value, values["loss"].double_value) == ("steps", 0.5)
    assert "failed: trainer.0" in [event.name for event in root.events]
    assert (root.status.code, root.status.message) == (2, "trainer.0: killed by SIGKILL")
    (of_run,) = collector.requests[0].resource_spans
    resource = {each.key: each.value.string_value for each in of_run.resource.attributes}
    assert (resource["service.name"], resource["rollcall.run"]) == ("rollcall", "run")


def test_what_is_sent_again_has_the_same_ids_whatever_the_sampler(
    run: FakeRun, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setattr(otlp_export, "_SPANS_PER_REQUEST", 2)
    assert send(run, "") == 0
    first = [span.span_id for span in collector.spans]
    assert len(first) == len(set(first)) > 4
    assert len(collector.requests) == (len(first) + 1) // 2
    assert {headers["authorization"] for headers in collector.headers} == {"Bearer key"}
    collector.requests.clear()
    assert send(run, f"{collector.url}/v1/traces", f"trace={run.root}/trace.json") == 0
    assert [span.span_id for span in collector.spans] == first
    assert (run.root / "trace.json").exists()


def test_a_collector_that_refuses_or_is_away_is_one_error(
    run: FakeRun, collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector.code = 400
    away = "http://127.0.0.1:9"
    for url in (collector.url, away):
        assert send(run, url) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"otlp='{url}': expected a collector that accepts OTLP over HTTP (it has 0 of " in error


def test_a_run_without_records_sends_nothing(tmp_path: Path, collector: Collector) -> None:
    assert send(FakeRun(tmp_path / "empty"), collector.url) == 0
    assert collector.requests == []
