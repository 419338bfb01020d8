"""The versions of a request's tokens, as they are collected; of vLLM's processes see `test_weights`."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.inference.vllm.token_versions import VersionedTokens, attach_versions, with_version


def collected(*versions: int | None) -> list[Any]:
    """A request whose tokens are of these versions, or of one that nobody told."""
    entries: list[Any] = []
    for version in versions:
        if version is not None:
            entries = with_version(entries, version)
        entries.append("entry")
    return entries


def spans(*versions: int | None) -> Any:
    entries = collected(*versions)
    assert isinstance(entries, VersionedTokens)
    return entries.spans()


def test_tokens_of_one_version_are_one_span() -> None:
    assert spans(7, 7, 8, 8, 8, 7) == [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 5},
        {"version": "7", "start": 5, "end": 6},
    ]


@pytest.mark.parametrize("versions", [(None, 7), (7, None), (7, None, 7)], ids=str)
def test_where_a_tokens_version_is_not_known_nothing_is_said(versions: tuple[int | None, ...]) -> None:
    assert spans(*versions) is None


@pytest.mark.parametrize("extra", ["allow", "ignore", None])
def test_it_is_said_where_an_answer_has_room_for_it(extra: str | None) -> None:
    made: Any = SimpleNamespace(model_config={"extra": extra} if extra else {})
    assert attach_versions(made, collected(7)) is made
    assert hasattr(made, "weight_versions") == (extra == "allow")
    assert not hasattr(attach_versions(SimpleNamespace(model_config={"extra": "allow"}), ["entry"]), "weight_versions")
