"""The times of each request, added to the server's response.

vLLM measures when a request was queued, first scheduled, and when its first and last tokens were sampled, but returns
these times for text only. Here `usage.choice_seconds` of a response has `[queue, prefill, decode]` for each choice, in
seconds (`pipeline.transport.turn_times` defines them): the intervals of vLLM's metrics `request_queue_time_seconds`,
`request_prefill_time_seconds` and `request_decode_time_seconds`. A choice without a token has null, and with
`--disable-log-stats` vLLM measures nothing. With an unknown release of vLLM, one warning is logged and nothing is
changed.
"""

import logging
import sys
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

log = logging.getLogger(__name__)
_SERVING = "vllm.entrypoints.scale_out.token_in_token_out.serving"
_STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
_SECONDS = "rollcall_seconds"
"""The attribute of a completion output with its times."""
FIELD = "choice_seconds"


def add_request_times() -> None:
    """Patch this vLLM server. A second call changes nothing."""
    try:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.output_processor import RequestState
        from vllm.v1.metrics.stats import RequestStateStats

        if AsyncLLM.generate.__module__ == __name__:
            return
        known = {*_STAMPS} <= {*RequestStateStats.__dataclass_fields__} and callable(
            RequestState._new_completion_output
        )
    except (ImportError, AttributeError):
        known = False
    if not known:
        log.warning("this release of vLLM is not known to %s: turns have no times of the engine", __name__)
        return
    RequestState._new_completion_output = _timing(RequestState._new_completion_output)
    AsyncLLM.generate = _preparing(AsyncLLM.generate)


def seconds_between(stats: Any) -> list[float] | None:
    """`[queue, prefill, decode]` of a request with these stamps; None before its first token."""
    queued, scheduled, first, last = (getattr(stats, stamp, 0.0) for stamp in _STAMPS)
    if not (queued and scheduled and first):
        return None
    return [max(0.0, end - begin) for begin, end in ((queued, scheduled), (scheduled, first), (first, last))]


def _timing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        if output.finish_reason is not None and self.stats is not None:
            setattr(output, _SECONDS, seconds_between(self.stats))
        return output

    return _new_completion_output


def _preparing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The first request patches the generate route, which is loaded by then, and before it starts its response."""

    @cache
    def prepare() -> None:
        serving = sys.modules.get(_SERVING)
        if serving is not None:
            add_times_to_responses(serving.ServingTokens)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare()
        return stock(self, *args, **kwargs)

    return generate


def add_times_to_responses(serving: Any) -> None:
    """Patch the class that builds the responses of the generate route."""
    stock = serving.serve_tokens_full_generator

    async def serve_tokens_full_generator(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        last: list[Any] = [None]
        response = await stock(self, request, _noting(results, last), *args, **kwargs)
        usage, outputs = getattr(response, "usage", None), getattr(last[0], "outputs", ())
        if usage is not None and type(usage).model_config.get("extra") == "allow":
            setattr(usage, FIELD, [getattr(output, _SECONDS, None) for output in outputs])
        return response

    serving.serve_tokens_full_generator = serve_tokens_full_generator


async def _noting(results: AsyncIterator[Any], last: list[Any]) -> AsyncIterator[Any]:
    """The results; the last one is noted."""
    async for result in results:
        last[0] = result
        yield result
