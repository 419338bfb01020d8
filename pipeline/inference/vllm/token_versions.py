"""Which weights sampled each token, in releases of vLLM that do not say it, or only of paused updates.

In the engine's process a step is marked with the version that the model has when it is scheduled. Releases that say
versions label a step's outputs when they are processed, with the version that a server received last: right where it is
paused for an update, and without a pause a step too late or too early. There the label becomes the mark. In older
releases, log-probabilities that go the cheaper way (`compact_logprobs`) take the mark along, a number for each token.
An API process collects the numbers of a request, and its answer has them in the form of later releases. Promises that a
token is said to be of the very weights that sampled it, and that an answer says nothing where it does not know the
version of every token. Where vLLM's code is not what this was written for, it says so once and changes nothing.
"""

import inspect
import logging
from collections.abc import Callable
from itertools import groupby
from typing import Any

log = logging.getLogger(__name__)
_FIELD = "_attach_weight_version"
"""What the engine of a release has that says it by itself."""
_MARK = "rollcall_version"
_NEVER = -1
"""The version of weights that no trainer sent: older than all that a client asks for."""


class _Engine:
    """What the engine of this process has."""

    weights: int | None = None
    """The version in the model, while steps may be under way that were scheduled with the one before."""
    processed: int | None = None
    """The version of the step whose outputs are processed."""
    labels: bool = False
    """Whether vLLM labels outputs with versions by itself."""


def version_of_step() -> int | None:
    """The version of the step whose outputs this engine process takes apart; None where vLLM says it by itself."""
    return None if _Engine.labels else _Engine.processed


def note_versions() -> None:
    """Have an engine in this vLLM process mark its steps; a second call changes nothing.

    An update runs between two steps, on the engine's own stream: a step has the weights that the model had when it was
    scheduled, also if its outputs are processed after the next update.
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
        log.warning("this release of vLLM is not known to %s: it may not say which weights sampled a token", __name__)
        return
    _Engine.weights, _Engine.labels = _NEVER, attach is not None
    if attach is not None:
        setattr(EngineCore, _FIELD, _labelling(attach))
    EngineCore.collective_rpc = _noting(EngineCore.collective_rpc)
    Scheduler.schedule = _marking(Scheduler.schedule)
    Scheduler.update_from_output = _processing(Scheduler.update_from_output)


def accepts_parameters(function: Callable[..., Any], *arguments: str) -> bool:
    """Whether a function of vLLM has these parameters, and no others."""
    return tuple(inspect.signature(function).parameters) == arguments


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = stock(self, method, timeout, args, kwargs)
        if method == "update_weights":
            _Engine.weights = int((kwargs or {})["update_info"]["version"])
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
    """Called right after `update_from_output`, with what it gave, by client."""

    def attach(self: Any, outputs: Any) -> None:
        stock(self, outputs)
        if _Engine.processed in (None, _NEVER):
            return
        for each in outputs.values():
            each.weight_version = str(_Engine.processed)

    return attach


class VersionedTokens(list[Any]):
    """The log-probabilities of a request, one entry a token, and the versions that were told."""

    def __init__(self, entries: list[Any]) -> None:
        super().__init__(entries)
        self.versions: list[int] = []

    def spans(self) -> list[dict[str, Any]] | None:
        """As later releases say it; None if a token's version is not known."""
        if len(self.versions) != len(self):
            return None
        spans, start = [], 0
        for version, same in groupby(self.versions):
            end = start + len([*same])
            spans.append({"version": str(version), "start": start, "end": end})
            start = end
        return spans


def with_version(entries: list[Any], version: int) -> VersionedTokens:
    """The log-probabilities of a request, whose next one is of this version."""
    versioned = entries if isinstance(entries, VersionedTokens) else VersionedTokens(entries)
    versioned.versions.append(version)
    return versioned


def attach_versions(made: Any, entries: Any) -> Any:
    """An answer's log-probabilities, made of these `entries`, with `weight_versions` where they are known."""
    if isinstance(entries, VersionedTokens) and made.model_config.get("extra") == "allow":
        made.weight_versions = entries.spans()
    return made
