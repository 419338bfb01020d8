"""The process that hands a run's metrics to wandb.

    python -P -m pipeline.tracking.wandb_process RUN_DIRECTORY RUN_ID END_FILE online|offline

Owns how a run appears there: one wandb run for a run over all its attempts (its id is the run_id), with the run's own
step as the axis. Promises to hand over every row that `metrics.jsonl` keeps until the end file appears, those of an
attempt that was cut off among them, and each step once: wandb cannot take back what a crash rolled back. Any failure is
the last line of its output. The only module that imports wandb; must not know the trainer.
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
    """What wandb gets of a row. Rows of the warm start have names below `sft/` and a step axis of their own."""
    prefix = "" if row["job"] == "rl" else f"{row['job']}/"
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in _HEAD}
    return {f"{prefix}{name}": value for name, value in numbers.items()} | {f"{prefix}step": row["step"]}


def sync_command(paths: RunPaths) -> str:
    """What sends the run, all its attempts at once, to wandb."""
    return f"wandb sync {shlex.quote(str(paths.tracking / 'wandb'))}/offline-run-*"


def start_wandb_run(config: RunConfig, run_id: str, folder: Path, mode: str) -> Any:
    """Start or resume the wandb run of `run_id`, its files below `folder`."""
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
    """Hand over the rows, each step once, until `end` exists and what was written before it is read.

    Args:
        metrics: the file of rows.
        run: wandb's.
        handed: a file of lines, one for each row that any attempt handed over, in order; written before the row is, so
            that it never has fewer than wandb.
        known: how many of them arrived, if wandb can tell; the others are handed over again.
        numbered: whether wandb is told the number of each row. Offline it does not know those of earlier attempts, and
            would begin at 0 in each: rows of the same number would meet when all are synced.
    """
    reader, last = RowReader(metrics), False
    marks, count = _last_steps(handed, known)
    while not last:
        last = end.exists()
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
    """The last step of each kind among the first `known` rows that were handed over, and how many these are; the file
    keeps those only."""
    lines = handed.read_bytes().splitlines(keepends=True) if handed.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")][:known]
    shared_files.write_atomic(handed, b"".join(whole))
    return dict(msgspec.json.decode(line, type=tuple[str, int]) for line in whole), len(whole)


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
    known = None if offline else run.starting_step  # wandb counts the rows that it was handed
    follow_metrics(paths.metrics, run, Path(end), paths.tracking / "handed.jsonl", known, numbered=offline)
    run.finish()
    if offline:
        print(f"to send this run to wandb: {sync_command(paths)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
