"""Which weights sampled each token, for releases of vLLM that do not say.

The engine's process notes the version that it serves; log-probabilities that go the cheaper way (`fast_logprobs`) take
it along, a number for each token; an API process collects the numbers of a request, and its answer has them in the form
of later releases. Promises that no token is said to be of newer weights than those that sampled it, and that an answer
says nothing where it does not know the version of every token.
"""

from typing import Any

_SAYS = "_attach_weight_version"
"""What the engine of a release has that says it by itself."""


class _Served:
    """What the engine of this process serves."""

    taken: int | None = None
    """In the model, though steps may be under way that had the weights before."""
    version: int | None = None


def served_version() -> int | None:
    """The version to be told of a step whose tokens this engine process sends off; None if the release says it, or
    before the first update."""
    return _Served.version


def note_versions() -> None:
    """Have an engine in this vLLM process note its version; a second call changes nothing.

    An update counts from the call that finishes it. That comes after the answer to the one that changed the weights, so
    what was sampled with the old ones has been sent off.
    """
    from vllm.v1.engine.core import EngineCore

    stock = EngineCore.collective_rpc
    if hasattr(EngineCore, _SAYS) or stock.__module__ == __name__:
        return

    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = stock(self, method, timeout, args, kwargs)
        if method == "update_weights":
            _Served.taken = int((kwargs or {})["update_info"]["version"])
        elif method == "finish_weight_update":
            _Served.version = _Served.taken
        return results

    EngineCore.collective_rpc = collective_rpc


class Versioned(list[Any]):
    """The log-probabilities of a request, one entry a token, and from where on which version sampled them."""

    def __init__(self, entries: list[Any]) -> None:
        super().__init__(entries)
        self._spans: list[tuple[int, int, int]] = []

    def note(self, version: int) -> None:
        """The next entry is of this version."""
        start = at = len(self)
        if self._spans and self._spans[-1][::2] == (version, at):
            _, start, _ = self._spans.pop()
        self._spans.append((version, start, at + 1))

    def spans(self) -> list[dict[str, Any]] | None:
        """As later releases say it; None if a token's version is not known."""
        if sum(end - start for _, start, end in self._spans) != len(self):
            return None
        return [{"version": str(version), "start": start, "end": end} for version, start, end in self._spans]


def noted(entries: list[Any], version: int) -> Versioned:
    """The log-probabilities of a request, whose next one is of this version."""
    versioned = entries if isinstance(entries, Versioned) else Versioned(entries)
    versioned.note(version)
    return versioned


def say_versions(made: Any, entries: Any) -> Any:
    """An answer's log-probabilities, made of these `entries`, with `weight_versions` where they are known."""
    if isinstance(entries, Versioned) and made.model_config.get("extra") == "allow":
        made.weight_versions = entries.spans()
    return made
