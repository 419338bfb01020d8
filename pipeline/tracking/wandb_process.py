"""The process that logs a run's metrics to wandb.

    python -P -m pipeline.tracking.wandb_process RUN_DIRECTORY RUN_ID END_FILE online|offline

All attempts of a run are one wandb run, whose id is the run_id and whose axis is the run's step. The process logs every
row of `metrics.jsonl` until the end file appears, including rows of a cut-off attempt. Each step is logged once, since
wandb cannot roll back. An error is the last line of the output. No other module imports wandb.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError
from pipeline.run.metrics_log import MetricRecord, RowReader
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK

START_SECONDS = 60.0
READ_SECONDS = 0.5
_HEAD = ("kind", "job", "step", "time", "written")
_QUIET = {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False, "disable_git": True}


def numbers_of(row: MetricRecord) -> dict[str, float]:
    """The numbers of a row for wandb. Rows of SFT have names below `sft/` and the step axis `sft/step`."""
    prefix = "" if row["job"] == "rl" else f"{row['job']}/"
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in _HEAD}
    return {f"{prefix}{name}": value for name, value in numbers.items()} | {f"{prefix}step": row["step"]}


def sync_command(paths: RunPaths) -> str:
    """The command that uploads an offline run with all its attempts to wandb."""
    return f"wandb sync {shlex.quote(str(paths.tracking / 'wandb'))}/offline-run-*"


def start_wandb_run(config: RunConfig, run_id: str, folder: Path, mode: str) -> Any:
    """Start or resume the wandb run of `run_id`, with its files below `folder`."""
    import wandb

    quiet = _QUIET if mode == "offline" else {}
    run = wandb.init(
        project=config.tracking.project,
        id=run_id,
        name=config.name,
        mode="offline" if mode == "offline" else "online",
        resume=None if mode == "offline" else "allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(console="off", silent=True, init_timeout=START_SECONDS, **quiet),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    run.define_metric("sft/*", step_metric="sft/step")
    return run


def follow_metrics(
    metrics: Path, run: Any, end: Path, handed: Path, known: int | None = None, *, numbered: bool = False
) -> None:
    """Log the rows to wandb, each step once, until `end` exists and all rows before it have been read.

    Args:
        metrics: the file of rows.
        run: the wandb run.
        handed: a file with one line per row that any attempt has logged, in order. A line is written before its row is
            logged, so the file never has fewer rows than wandb.
        known: the number of rows that wandb has received, if it reports it. The rows after them are logged again.
        numbered: whether to pass row numbers to wandb. In offline mode, each attempt would start at 0, and rows with
            equal numbers would collide in the upload.
    """
    reader, last = RowReader(metrics), False
    marks, count = _last_steps(handed, known)
    while not last:
        last = end.exists()  # before reading: rows that were written before the end file are still logged
        for row in reader.read():
            kind = "/".join((row["kind"], row["job"], *([row["set"]] if "set" in row else [])))
            if row["step"] > marks.get(kind, -1):
                marks[kind] = row["step"]
                _append(handed, kind, row["step"])
                run.log(numbers_of(row), **({"step": count} if numbered else {}))
                count += 1
        if not last:
            CLOCK.sleep(READ_SECONDS)


def _last_steps(handed: Path, known: int | None) -> tuple[dict[str, int], int]:
    """The last step of each kind among the first `known` logged rows, and their number. Truncates the file to them."""
    lines = handed.read_bytes().splitlines(keepends=True) if handed.exists() else []
    complete = [line for line in lines if line.endswith(b"\n")][:known]
    shared_files.write_atomic(handed, b"".join(complete))
    return dict(msgspec.json.decode(line, type=tuple[str, int]) for line in complete), len(complete)


def _append(handed: Path, kind: str, step: int) -> None:
    with handed.open("ab") as file:
        file.write(msgspec.json.encode((kind, step)) + b"\n")


def main(arguments: list[str]) -> None:
    directory, run_id, end, mode = arguments
    paths = RunPaths(Path(directory))
    tree = shared_files.read_document(paths.config, dict[str, Any])
    if tree is None:
        raise ConfigError("config", str(paths.config), "a readable file")
    run = start_wandb_run(load_config(tree), run_id, paths.tracking, mode)
    offline = mode == "offline"
    known = None if offline else run.starting_step  # wandb counts the rows that it has received
    follow_metrics(paths.metrics, run, Path(end), paths.tracking / "handed.jsonl", known, numbered=offline)
    run.finish()
    if offline:
        print(f"to send this run to wandb: {sync_command(paths)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
