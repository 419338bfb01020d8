"""The log of an offline job, one JSON line per event.

The trainer's rank 0 writes it, at the path in the job file, for the job's submitter. The launcher and the report read
`metrics.jsonl` instead, which has the same steps. Promises that each line is written in one piece, and that an
execution begins with a new file, so that `tail -F` follows it. Must not know algorithms.

    log = JobLog(Path(job.log))
    log.clear()                                   # removes the log of an earlier execution
    log.write("step", step=1, loss=0.7)
    log.write("finished")                         # the last line: all resources of the job are released
"""

import json
import time
from pathlib import Path
from typing import Any

_INFINITE = (float("inf"), float("-inf"))


class JobLog:
    """A file of events in JSON, one per line: `event`, `time` (seconds since the epoch), and fields of the event."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Remove the file of an earlier execution; the next event creates a new one."""
        self.path.unlink(missing_ok=True)

    def write(self, event: str, **details: Any) -> None:
        """Append a line, in one write; a number that is not finite becomes null."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: None if value != value or value in _INFINITE else value for name, value in details.items()}
        line = json.dumps({"event": event, "time": round(time.time(), 3), **whole})
        with self.path.open("a") as file:
            file.write(line + "\n")
