"""Numbers as people read them; shared by the report and the terminal view. Pure."""


def clock(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def number(value: float | None, form: str) -> str:
    """The value in a format of `format`, or a dash when there is none."""
    return "—" if value is None else format(value, form)


def plural(amount: int, what: str) -> str:
    """`1 attempt`, `2 attempts`."""
    return f"{amount} {what}" if amount == 1 else f"{amount} {what}s"
