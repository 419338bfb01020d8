"""The log of a job: what its trainer tells, line by line.

Owns the file's form, and its two uses here: the trainer's rank 0 removes it before the job is executed, and writes it.
Both take the path from the job. Its reader is whoever submitted the job: the launcher and the report read
`metrics.jsonl`, which has the same steps. Promises that each line is written in one piece, and that an execution begins
with a new file, so that `tail -F` follows it. Must not know what a job does.

    log = JobLog(Path(job.log))
    log.clear()                                   # what an earlier execution wrote is not of this one
    log.write("step", step=1, loss=0.7)           # the trainer
    log.write("finished")                         # its last act: by now nothing is mapped, held or left
"""

import json
import time
from pathlib import Path
from typing import Any

_INFINITE = (float("inf"), float("-inf"))


class JobLog:
    """One event a line, in JSON: `event`, `time` (seconds since the epoch), and what belongs to the event."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Remove what an earlier execution wrote; the next line makes a new file."""
        self.path.unlink(missing_ok=True)

    def write(self, event: str, **details: Any) -> None:
        """Add a line, in one write; a number that is not finite is null."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: None if value != value or value in _INFINITE else value for name, value in details.items()}
        line = json.dumps({"event": event, "time": round(time.time(), 3), **whole})
        with self.path.open("a") as file:
            file.write(line + "\n")
