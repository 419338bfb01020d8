"""A compact encoding of the log-probabilities of sampled tokens, from vLLM's engine process to its response.

vLLM slices three arrays per request and step, and encodes each array separately; with a small model this takes as much
of the engine's time as everything else. If no request of a step needs more than its sampled tokens, plain numbers are
sent instead. The receiver distinguishes the encodings by the number of dimensions: one here, two in vLLM's. The policy
version follows the ranks, if the engine marks its steps (`token_versions`). Responses are the same, except that they do
not repeat the sampled token. With an unknown release of vLLM, one warning is logged and nothing is changed.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import iscoroutinefunction, signature
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel

from pipeline.inference.vllm.stock_functions import accepts_parameters
from pipeline.inference.vllm.token_versions import attach_versions, version_of_step, with_version

log = logging.getLogger(__name__)
SWITCH = "ROLLCALL_FAST_LOGPROBS"
"""The environment variable of a server that disables this encoding with the value 0."""
_LISTS = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
_SERVING = "vllm.entrypoints.scale_out.token_in_token_out.serving"
_ROUTER = "vllm.entrypoints.scale_out.token_in_token_out.api_router"
_ENTRIES = ("ChatCompletionLogProb", "ChatCompletionLogProbsContent", "GenerateLogProb", "GenerateLogProbsContent")


def add_compact_logprobs(variables: Mapping[str, str] = os.environ) -> None:
    """Patch this vLLM process to use the compact encoding. A second call changes nothing."""
    if variables.get(SWITCH) == "0":
        return
    try:
        from vllm.logprobs import Logprob
        from vllm.v1.engine.logprobs import LogprobsProcessor
        from vllm.v1.outputs import LogprobsLists
        from vllm.v1.serial_utils import MsgpackDecoder

        if LogprobsLists.slice_request.__module__ == __name__:
            return
        known = (
            accepts_parameters(LogprobsLists, *_LISTS)
            and accepts_parameters(LogprobsLists.slice_request, "self", "req_idx", "num_positions")
            and accepts_parameters(MsgpackDecoder._decode_ndarray, "self", "arr")
            and accepts_parameters(LogprobsProcessor._update_sample_logprobs, "self", "logprobs_lists")
            and accepts_parameters(Logprob, "logprob", "rank", "decoded_token")
        )
    except (ImportError, AttributeError):
        known = False
    if not known:
        log.warning("this release of vLLM is not known to %s: log-probabilities keep vLLM's encoding", __name__)
        return
    LogprobsLists.slice_request = _slicing(LogprobsLists.slice_request, LogprobsLists)
    MsgpackDecoder._decode_ndarray = _decoding(MsgpackDecoder._decode_ndarray)
    stock = LogprobsProcessor._update_sample_logprobs
    LogprobsProcessor._update_sample_logprobs = _updating(stock, LogprobsLists, Logprob)


class SampledLogprobs(dict[int, Any]):
    """The sampled token of one position, for a request without alternatives.

    `items` is empty, so a response lists no alternatives, where vLLM would repeat the sampled token. If another request
    of the step needs alternatives, vLLM's own entry is used.
    """

    __slots__ = ()

    def items(self) -> Any:
        return ()

    def __reduce__(self) -> Any:
        return SampledLogprobs, (tuple(super().items()),)


def add_compact_responses(serving: Any, router: Any) -> None:
    """Patch the generate route to build its responses faster: without validation of entries, and with msgspec for JSON.

    Many requests end in one step, and the next requests wait for their responses. Received policy versions are added.
    """
    try:
        tokens = serving.ServingTokens
        stock = tokens._create_tokens_logprobs
        known = {"self", "token_ids", "top_logprobs"} <= {*signature(stock).parameters}
        known = known and not iscoroutinefunction(stock) and callable(router.JSONResponse.render)
    except (AttributeError, TypeError, ValueError):
        known = False
    if not known:
        log.warning("this release of vLLM is not known to %s: responses are built by vLLM", __name__)
        return
    tokens._create_tokens_logprobs = _serializing(stock)
    for name in _ENTRIES:
        model = getattr(serving, name, None)
        if isinstance(model, type) and issubclass(model, BaseModel):
            setattr(serving, name, _unvalidated(model))
    router.JSONResponse = _encoded(router.JSONResponse)


def _slicing(stock: Callable[..., Any], lists: Any) -> Callable[..., Any]:
    """A `slice_request` for the engine process that builds the parts of all one-token requests of a step at once."""
    whole: Any = None
    parts: list[Any] = []

    def slice_request(self: Any, req_idx: int, num_positions: int) -> Any:
        nonlocal whole, parts
        if self.cu_num_generated_tokens is not None and np.shape(self.logprobs)[1:] == (1,):
            return lists(*_drafted(self, self.cu_num_generated_tokens[req_idx], num_positions), None)
        if num_positions != 1 or self.cu_num_generated_tokens is not None:
            return stock(self, req_idx, num_positions)
        if self.logprobs is not whole:  # the first request of a new step
            whole = self.logprobs
            parts = [*map(lists, *_columns(self), repeat(None))] if np.shape(whole)[1:] == (1,) else []
        return parts[req_idx] if parts else stock(self, req_idx, num_positions)

    return slice_request


def _drafted(step: Any, start: int, count: int) -> tuple[tuple[float, ...], ...]:
    """A request's tokens of a step with drafts, their log-probabilities, and their ranks followed by their versions."""
    rows = slice(start, start + count)
    ids, values, ranks = step.logprob_token_ids[rows, 0], step.logprobs[rows, 0], step.sampled_token_ranks[rows]
    version = version_of_step()
    versions = () if version is None else repeat(version, count)
    return tuple(ids.tolist()), tuple(values.tolist()), (*ranks.tolist(), *versions)


def _columns(step: Any) -> list[Iterator[tuple[float, ...]]]:
    """For each row of a step: its token, its log-probability, and its rank followed by the policy version."""
    ids, values, ranks = step.logprob_token_ids[:, 0], step.logprobs[:, 0], step.sampled_token_ranks
    version = version_of_step()
    versions = () if version is None else (repeat(version),)
    columns = ((ids,), (values,), (ranks, *versions))
    return [zip(column.tolist(), *along, strict=False) for column, *along in columns]


def _decoding(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder for both encodings of an array."""

    def decode(self: Any, arr: Any) -> Any:
        # vLLM's encoding starts with the name of a dtype.
        return stock(self, arr) if arr and isinstance(arr[0], str) else np.array(arr)

    return decode


def _updating(stock: Callable[..., Any], lists: Any, logprob: Any) -> Callable[..., Any]:
    """An `_update_sample_logprobs` for API processes. Its first call patches the generate route, if it is loaded."""

    @functools.cache
    def prepare() -> None:
        if _ROUTER in sys.modules:
            add_compact_responses(sys.modules.get(_SERVING), sys.modules[_ROUTER])

    def update(self: Any, logprobs_lists: Any) -> None:
        prepare()
        ids, values, ranks = map(np.asarray, logprobs_lists[:3])
        if values.ndim != 1:
            stock(self, logprobs_lists)
            return
        # ranks[tokens], followed by as many policy versions if the engine marks its steps.
        ranks, versions = ranks[: len(ids)], ranks[len(ids) :].tolist()
        if self.tokenizer is not None or not isinstance(self.logprobs, list):
            stock(self, lists(ids[:, None], values[:, None], ranks, None))
            return
        for version in versions:
            self.logprobs = with_version(self.logprobs, version)
        for token, value, rank in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True):
            self.cumulative_logprob += value
            self.logprobs.append(SampledLogprobs(((token, logprob(value, rank, None)),)))

    return update


def _serializing(stock: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(stock)

    def create(*args: Any, **kwargs: Any) -> Any:
        entries = parameters.bind(*args, **kwargs).arguments["top_logprobs"]
        return attach_versions(stock(*args, **kwargs), entries)

    return create


def _encoded(response: Any) -> Any:
    """The response class with msgspec as its encoder, which encodes NaN as null instead of raising an error."""

    class Encoded(response):  # type: ignore[misc]
        def render(self, content: Any) -> bytes:
            return msgspec.json.encode(content)

    return Encoded


def _unvalidated(model: type[BaseModel]) -> Callable[..., BaseModel]:
    """A constructor without validation, for valid values. `model_construct` takes twice the time of validation."""
    fields = model.model_fields.items()
    blank = {
        name: None if field.is_required() else field.get_default(call_default_factory=True) for name, field in fields
    }
    extra: dict[str, Any] | None = {} if model.model_config.get("extra") == "allow" else None
    assign = object.__setattr__

    def make(**values: Any) -> BaseModel:
        made = model.__new__(model)
        assign(made, "__dict__", blank | values)
        assign(made, "__pydantic_fields_set__", set(values))
        assign(made, "__pydantic_extra__", extra)
        assign(made, "__pydantic_private__", None)
        return made

    return make
