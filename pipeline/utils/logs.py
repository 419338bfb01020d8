"""Logging of the roles.

Owns the form of a log line and where it goes: standard error, which the agent keeps as the role's log. Promises one
line a record (time, level, role, message); only a traceback follows on indented lines. Knows nothing of what is logged.

    2026-01-31 12:00:00.123 INFO trainer.0 step 25 of 150
"""

import logging
import sys
from typing import IO


class LineFormatter(logging.Formatter):
    """Keeps a record on one line, whatever its message holds."""

    def __init__(self, role: str) -> None:
        super().__init__(
            f"{{asctime}}.{{msecs:03.0f}} {{levelname}} {role.replace('{', '').replace('}', '')} {{message}}",
            datefmt="%Y-%m-%d %H:%M:%S",
            style="{",
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", " ⏎ ")

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {line}" for line in text.splitlines())


def configure(role: str, level: int = logging.INFO, stream: IO[str] | None = None) -> None:
    """Log everything from `level` on, as `role`, to `stream` (standard error); replaces an earlier set-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(role))
    handler.setLevel(level)  # some libraries' loggers have a lower level of their own
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
