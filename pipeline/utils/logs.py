"""Logging of the roles: the format of a line, and its destination.

Lines go to standard error, which the agent stores as the role's log. A record takes one line (time, level, role,
message); only a traceback follows on indented lines.

    2026-01-31 12:00:00.123 INFO trainer.0 step 25 of 150
"""

import logging
import sys
from collections.abc import Sequence
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


class LevelFilter(logging.Filter):
    """Passes records from a level on, and all records of some modules and of the modules below them.

    On the handler, because the loggers of some libraries set a lower level.
    """

    def __init__(self, level: int, modules: Sequence[str]) -> None:
        super().__init__()
        self._level, self._modules = level, tuple(modules)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self._level or f"{record.name}.".startswith(tuple(f"{m}." for m in self._modules))


def configure(role: str, level: str = "info", modules: Sequence[str] = (), stream: IO[str] | None = None) -> None:
    """Log all records from `level` on, and every record of `modules`, as `role`, to `stream`.

    `level` and `modules` are `debug.log_level` and `debug.log_modules`; the default stream is standard error. Replaces
    earlier handlers.
    """
    lowest = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(role))
    handler.addFilter(LevelFilter(lowest, modules))
    for module in modules:
        logging.getLogger(module).setLevel(logging.DEBUG)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(lowest)
    logging.captureWarnings(True)
