"""Calls of foreign code.

Owns how whatever it raises becomes one line. Must not know what is called.
"""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
REASON_LENGTH = 200


def call_guarded(what: str, call: Callable[[], T]) -> T | str:
    """What `call` gives, or `what ErrorName: text` of whatever it raised, `SystemExit` included."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 the task is foreign code: whatever it raises is the sample's reason
        return failure_reason(what, error)


def failure_reason(what: str, error: BaseException) -> str:
    """`what ErrorName: text` on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 an error of the task's own, which cannot even say what it is
        text = "its message cannot be made"
    return f"{what} {type(error).__name__}: {text}"[:REASON_LENGTH]
