"""The spans of a run, sent to a collector by the OpenTelemetry protocol (OTLP over HTTP).

Each attempt is a trace: one span for the attempt, with the instants as its events, and below it the spans of its tracks
(`run_trace`). Ids are computed from the run and the attempt, so an attempt that is sent again has the same ids.
Headers, certificates and timeouts are those of OpenTelemetry's environment variables
(https://opentelemetry.io/docs/specs/otel/protocol/exporter/).

    export_spans(read_history(root), "http://collector:4318")     # number of spans sent
"""

import hashlib
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.observability.run_history import History
from pipeline.observability.run_trace import AttemptTrace, Span, attempt_traces
from pipeline.utils.optional_extras import pip_install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, Tracer

_PATH = "/v1/traces"
_SPANS_PER_REQUEST = 512
_SERVICE = "rollcall"


def export_spans(history: History, url: str) -> int:
    """Send all spans of a run; returns their number.

    Args:
        history: the run's records.
        url: the collector, such as `http://collector:4318`; empty: that of OTEL_EXPORTER_OTLP_ENDPOINT, by default
            this machine.

    `ConfigError` if OpenTelemetry is not installed, or if the collector does not accept the spans.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError:
        raise ConfigError("otlp", url, "OpenTelemetry installed", pip_install("otlp")) from None
    exporter = OTLPSpanExporter(endpoint=_endpoint(url))
    spans = [span for trace in attempt_traces(history) for span in _spans_of(history, trace)]
    try:
        for first in range(0, len(spans), _SPANS_PER_REQUEST):
            if exporter.export(spans[first : first + _SPANS_PER_REQUEST]) is not SpanExportResult.SUCCESS:
                expected = f"a collector that accepts OTLP over HTTP (it has {first} of {len(spans)} spans)"
                raise ConfigError("otlp", url, expected, "the reason is in the lines above; then send all again")
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return len(spans)


def _endpoint(url: str) -> str | None:
    if not url:
        return None
    return url if url.endswith(_PATH) else url.rstrip("/") + _PATH


def _spans_of(history: History, trace: AttemptTrace) -> "list[ReadableSpan]":
    """The spans of an attempt, parents after their children; none for an attempt without a record."""
    spans = [span for track in trace.tracks.values() for span in track]
    times = [time for begin, end, _, _ in spans for time in (begin, end)] + [time for time, _, _ in trace.instants]
    if not times:
        return []
    run_id = history.identity.run_id if history.identity else history.name
    tracer, ended = _collecting_tracer({"service.name": _SERVICE, "rollcall.run": history.name}, run_id, trace)
    attempt = tracer.start_span(f"attempt {trace.attempt.name}", context=_below(None), start_time=_nanos(min(times)))
    attempt.set_attributes({"rollcall.run_id": run_id, "rollcall.attempt": trace.attempt.name})
    for time, label, detail in trace.instants:
        attempt.add_event(label, {"detail": detail}, _nanos(time))
    if trace.attempt.has_failed:
        _mark_failed(attempt, trace)
    for track, own in trace.tracks.items():
        _add_track(tracer, attempt, track, own)
    attempt.end(_nanos(max(times)))
    return ended


def _add_track(tracer: "Tracer", attempt: Any, track: str, spans: list[Span]) -> None:
    """Add the spans of a track, each below the one that contains it."""
    containing: list[tuple[float, Any]] = []
    for begin, end, label, arguments in spans:
        while containing and containing[-1][0] <= begin:
            containing.pop()
        parent = containing[-1][1] if containing else attempt
        attributes = {"rollcall.track": track} | {key: value for key, value in arguments.items() if value is not None}
        span = tracer.start_span(label, context=_below(parent), start_time=_nanos(begin), attributes=attributes)
        span.end(_nanos(max(begin, end)))
        containing.append((end, span))


def _mark_failed(span: Any, trace: AttemptTrace) -> None:
    from opentelemetry.trace import Status, StatusCode

    failure = trace.attempt.failure
    span.set_status(Status(StatusCode.ERROR, f"{failure.role}: {failure.cause}" if failure else None))


def _below(parent: Any) -> Any:
    """The context in which a span becomes the child of `parent`, or a root."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(parent, Context()) if parent else Context()


def _collecting_tracer(
    resource: Mapping[str, str], run_id: str, trace: AttemptTrace
) -> "tuple[Tracer, list[ReadableSpan]]":
    """A tracer, and the list to which it adds each span that ends. It drops none, with any environment."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    ended: list[ReadableSpan] = []

    class Collector(SpanProcessor):
        def on_end(self, span: "ReadableSpan") -> None:
            ended.append(span)

    class StableIds(IdGenerator):
        def __init__(self) -> None:
            self._numbers = count()

        def generate_trace_id(self) -> int:
            return self._hash("trace", 16)

        def generate_span_id(self) -> int:
            return self._hash(str(next(self._numbers)), 8)

        def _hash(self, name: str, size: int) -> int:
            text = f"{run_id}/{trace.attempt.name}/{name}"
            return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1

    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource.create(resource),
        id_generator=StableIds(),
        span_limits=SpanLimits(max_events=SpanLimits.UNSET),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(Collector())
    return provider.get_tracer(_SERVICE), ended  # type: ignore[return-value]


def _nanos(time: float) -> int:
    return round(time * 1e9)
