"""The log of a job: what its trainer tells, line by line.

Owns the file's form and the three who use it: the writer (the trainer's rank 0), the follower (whoever waits for the
job), and the cleaner (before the job is executed). All three take the path from the job. Promises that a follower gets
whole lines only, each once. Must not know what a job does.

    log = JobLog(Path(job.log))
    log.clear()                                   # what an earlier execution wrote is not of this one
    log.write("step", step=1, loss=0.7)           # the trainer
    log.write("finished")                         # its last act: by now nothing is mapped, held or left

    log.new_lines()                               # a follower, now and then
"""

import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

ENDS = ("finished", "failed", "interrupted")
"""The events after which an execution writes nothing more."""
Line = dict[str, Any]
_INFINITE = (float("inf"), float("-inf"))


class JobLog:
    """One event a line, in JSON: `event`, `time` (seconds since the epoch), and what belongs to the event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._read = 0, 0

    def clear(self) -> None:
        """Remove what an earlier execution wrote; followers begin anew."""
        self.path.unlink(missing_ok=True)

    def write(self, event: str, **details: Any) -> None:
        """Add a line, in one write; a number that is not finite is null."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: None if value != value or value in _INFINITE else value for name, value in details.items()}
        line = json.dumps({"event": event, "time": round(time.time(), 3), **whole})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def new_lines(self) -> list[Line]:
        """The whole lines since the last call; one that is still being written comes with a later call."""
        try:
            with self.path.open("rb") as file:
                return self._new_lines_of(file)
        except FileNotFoundError:
            return []

    def _new_lines_of(self, file: BinaryIO) -> list[Line]:
        found = os.fstat(file.fileno())
        if found.st_ino != self._file or found.st_size < self._read:  # cleared since, and begun anew
            self._file, self._read = found.st_ino, 0
        file.seek(self._read)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
