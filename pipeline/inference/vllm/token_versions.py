"""The policy version that sampled each token, for releases of vLLM that report none, or only for paused updates.

The engine process marks each step with the model's version when the step is scheduled. Releases that report versions
label a step's outputs when they are processed, with the last version that the server received. This is correct only if
the server pauses for updates; otherwise the label may be one step early or late, and is replaced by the mark. In older
releases, the mark is sent with compact log-probabilities (`compact_logprobs`), one number per token, and the response
has the format of later releases.

Each token is labeled with the version that sampled it. If any token's version is unknown, the response omits all
labels. With an unknown release of vLLM, one warning is logged and nothing is changed.
"""

import logging
from collections.abc import Callable
from itertools import groupby
from typing import Any

from pipeline.inference.vllm.stock_functions import accepts_parameters

log = logging.getLogger(__name__)
_FIELD = "_attach_weight_version"
"""The method of `EngineCore` in releases that report versions."""
_MARK = "rollcall_version"
_NEVER = -1
"""The version of the initial weights, before any update by the trainer: older than any requested version."""


class _Engine:
    """The version state of the engine in this process."""

    weights: int | None = None
    """The version in the model. Steps that were scheduled with the previous version may still be running."""
    processed: int | None = None
    """The version of the step whose outputs are being processed."""
    labels: bool = False
    """Whether this release of vLLM labels outputs with versions."""


def version_of_step() -> int | None:
    """The version of the step whose outputs this engine process is processing; None if vLLM labels them."""
    return None if _Engine.labels else _Engine.processed


def note_versions() -> None:
    """Patch the engine in this vLLM process to mark its steps. A second call changes nothing.

    An update runs between two steps, on the engine's stream. So a step computes with the weights that the model had
    when the step was scheduled, even if its outputs are processed after the next update.
    """
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        if EngineCore.collective_rpc.__module__ == __name__:
            return
        attach = getattr(EngineCore, _FIELD, None)
        known = (
            accepts_parameters(EngineCore.collective_rpc, "self", "method", "timeout", "args", "kwargs")
            and accepts_parameters(Scheduler.update_from_output, "self", "scheduler_output", "model_runner_output")
            and (attach is None or accepts_parameters(attach, "self", "outputs"))
        )
    except (ImportError, AttributeError):
        known = False
    if not known:
        log.warning("this release of vLLM is not known to %s: tokens may have no policy version", __name__)
        return
    _Engine.weights, _Engine.labels = _NEVER, attach is not None
    if attach is not None:
        setattr(EngineCore, _FIELD, _labelling(attach))
    EngineCore.collective_rpc = _noting(EngineCore.collective_rpc)
    Scheduler.schedule = _marking(Scheduler.schedule)
    Scheduler.update_from_output = _processing(Scheduler.update_from_output)


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = stock(self, method, timeout, args, kwargs)
        if method == "update_weights":
            version = int((kwargs or {})["update_info"]["version"])
            if all(served == [version] for served in stock(self, "served_weights", timeout)):
                _Engine.weights = version
        return results

    return collective_rpc


def _marking(stock: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = stock(self, *args, **kwargs)
        setattr(step, _MARK, _Engine.weights)
        return step

    return schedule


def _processing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        _Engine.processed = getattr(scheduler_output, _MARK)
        return stock(self, scheduler_output, model_runner_output)

    return update_from_output


def _labelling(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A patched label method. vLLM calls it right after `update_from_output`, with its results by client."""

    def attach(self: Any, outputs: Any) -> None:
        stock(self, outputs)
        if _Engine.processed in (None, _NEVER):
            return
        for output in outputs.values():
            output.weight_version = str(_Engine.processed)

    return attach


class VersionedTokens(list[Any]):
    """The log-probabilities of a request, one entry per token, and the received versions."""

    def __init__(self, entries: list[Any]) -> None:
        super().__init__(entries)
        self.versions: list[int] = []

    def spans(self) -> list[dict[str, Any]] | None:
        """Ranges of tokens with equal versions, in the format of later releases; None if any version is unknown."""
        if len(self.versions) != len(self):
            return None
        spans, start = [], 0
        for version, same in groupby(self.versions):
            end = start + len([*same])
            spans.append({"version": str(version), "start": start, "end": end})
            start = end
        return spans


def with_version(entries: list[Any], version: int) -> VersionedTokens:
    """The log-probabilities of a request, with `version` added for the next entry."""
    versioned = entries if isinstance(entries, VersionedTokens) else VersionedTokens(entries)
    versioned.versions.append(version)
    return versioned


def attach_versions(logprobs: Any, entries: Any) -> Any:
    """The log-probabilities of a response, built from these `entries`, with `weight_versions` if they are known."""
    if isinstance(entries, VersionedTokens) and logprobs.model_config.get("extra") == "allow":
        logprobs.weight_versions = entries.spans()
    return logprobs
