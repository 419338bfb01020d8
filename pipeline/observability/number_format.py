"""Formats of numbers, shared by the report and the terminal view. Pure."""

import time


def clock(seconds: float) -> str:
    """A duration as `0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def moment(seconds: float, form: str, *, local: bool = False) -> str:
    """A time since the epoch in a format of `strftime`, in UTC or in the `local` zone; a dash if it has no date."""
    try:
        return time.strftime(form, time.localtime(seconds) if local else time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged record may have any number
        return "—"


def number(value: float | None, form: str) -> str:
    """The value in a format of `format`, or a dash for None."""
    return "—" if value is None else format(value, form)


def plural(amount: int, noun: str) -> str:
    """A number with its noun: `1 attempt`, `2 attempts`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"
