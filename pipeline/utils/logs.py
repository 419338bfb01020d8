"""Logging of the roles: the format of a line, and its destination.

Lines go to standard error, which the agent stores as the role's log. A record takes one line (time, level, role,
message); only a traceback follows on indented lines.

    2026-01-31 12:00:00.123 INFO trainer.0 step 25 of 150
"""

import logging
import sys
from typing import IO


class LineFormatter(logging.Formatter):
    """Formats a record on one line: line ends in its message become `⏎`."""

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
    """Log all records from `level` on, as `role`, to `stream` (default: standard error). Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(role))
    handler.setLevel(level)  # the loggers of some libraries set a lower level
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
