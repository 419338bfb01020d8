"""Calls of foreign code, whose errors become one line.

Owns the text of that line. Must not know what is called.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
REASON_LENGTH = 200


def call_guarded(what: str, call: Callable[[], T]) -> T | str:
    """The result of `call`, or `what ErrorName: text` for any error, `SystemExit` included."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 the task is foreign code: whatever it raises is the sample's reason
        return failure_reason(what, error)


def failure_reason(what: str, error: BaseException) -> str:
    """`what ErrorName: text` on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 the task's error class may fail in its own `__str__`
        text = "its message cannot be made"
    return encodable(f"{what} {type(error).__name__}: {text}")[:REASON_LENGTH]


def reason_line(text: str) -> str:
    """A text of foreign code as a failure reason: one line of at most `REASON_LENGTH` characters, which can be
    encoded."""
    return encodable(" ".join(text.split()))[:REASON_LENGTH]


def encodable(text: str) -> str:
    """The text with each lone surrogate as its escape: JSON of a policy or an agent may have half of an emoji, and no
    record can hold it.

    >>> encodable("half \\ud83d")
    'half \\\\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def is_cancelled() -> bool:
    """Whether the running asyncio task was requested to end. Else foreign code raised its `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
