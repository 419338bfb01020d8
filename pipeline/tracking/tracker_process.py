"""The process of a tracker.

    python -P -m pipeline.tracking.tracker_process TRACKER RUN_DIRECTORY RUN_ID END_FILE online|offline

Logs every row of `metrics.jsonl` until the end file appears, including rows of a cut-off attempt. Each step is logged
once. A service that cannot delete rows keeps the first numbers of a step that was rolled back. An error is the last
line of the output.
"""

import sys
import traceback
from pathlib import Path
from typing import Any, cast

import msgspec

from pipeline.config import load_config
from pipeline.errors import ConfigError, one_line
from pipeline.run.metrics_log import RowReader
from pipeline.run.paths import RunPaths
from pipeline.tracking.tracker_protocol import Mode, Tracker, logged_rows, tracker_class
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK

READ_SECONDS = 0.5


def follow_metrics(metrics: Path, tracker: Tracker, end: Path, logged: Path) -> None:
    """Log the rows, each step once, until `end` exists and all rows before it have been read.

    Args:
        metrics: the file of rows.
        logged: a file with one line per row that any attempt has logged, in order. A line is written before its row is
            logged, so the file never has fewer rows than the service. If the service reports how many rows it has
            received, the rows after them are logged again.
    """
    reader, last = RowReader(metrics), False
    marks, count = _last_steps(logged, tracker.received)
    while not last:
        last = end.exists()  # before reading: rows that were written before the end file are still logged
        new = reader.read()
        # All rows are new at the first read, and when a rollback has replaced the file.
        if new and reader.is_first and tracker.start_over():
            marks, count = _last_steps(logged, 0)
        for row in new:
            kind = "/".join((row["kind"], row["job"], *([row["set"]] if "set" in row else [])))
            if row["step"] > marks.get(kind, -1):
                marks[kind] = row["step"]
                _append(logged, kind, row["step"])
                tracker.log(row, count)
                count += 1
        if not new:
            tracker.idle()
        if not last:
            CLOCK.sleep(READ_SECONDS)


def _last_steps(logged: Path, received: int | None) -> tuple[dict[str, int], int]:
    """The last step of each kind among the first `received` rows, and their number. Truncates the file to them."""
    lines = logged.read_bytes().splitlines(keepends=True) if logged.exists() else []
    complete = [line for line in lines if line.endswith(b"\n")][:received]
    shared_files.write_atomic(logged, b"".join(complete))
    return dict(msgspec.json.decode(line, type=tuple[str, int]) for line in complete), len(complete)


def _append(logged: Path, kind: str, step: int) -> None:
    with logged.open("ab") as file:
        file.write(msgspec.json.encode((kind, step)) + b"\n")


def main(arguments: list[str]) -> None:
    name, directory, run_id, end, mode = arguments
    paths = RunPaths(Path(directory))
    tree = shared_files.read_document(paths.config, dict[str, Any])
    if tree is None:
        raise ConfigError("config", str(paths.config), "a readable file")
    tracker = tracker_class(name)(load_config(tree), run_id, paths.tracking, cast(Mode, mode))
    follow_metrics(paths.metrics, tracker, Path(end), logged_rows(paths.tracking, name))
    tracker.finish()
    if command := tracker.upload_command(paths):
        print(f"to upload this run: {command}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        traceback.print_exc()
        # The trainer's warning has the last line. A service's message may have several, with the reason in the first.
        sys.exit(one_line(error))
