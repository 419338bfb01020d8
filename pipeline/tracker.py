"""The process that hands a run's metrics to wandb.

    python -P -m pipeline.tracker RUN_DIRECTORY RUN_ID ATTEMPT END_FILE online|offline

Owns how a run appears there: one wandb run for a run over all its attempts (its id is the run_id), with the run's own
step as the axis. Promises to hand over every row of its attempt in `metrics.jsonl` until the end file appears, and that
any failure is the last line of its output. The only module that imports wandb; must not know the trainer.
"""

import sys
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError
from pipeline.metrics import Row, RowReader
from pipeline.paths import RunPaths
from pipeline.waiting import CLOCK

START_SECONDS = 60.0
READ_SECONDS = 0.5
_HEAD = ("kind", "job", "step", "time")
_QUIET = {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False, "disable_git": True}


def numbers_of(row: Row) -> dict[str, float]:
    """What wandb gets of a row. Rows of the warm start have names below `sft/` and a step axis of their own."""
    prefix = "" if row["job"] == "rl" else f"{row['job']}/"
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in _HEAD}
    return {f"{prefix}{name}": value for name, value in numbers.items()} | {f"{prefix}step": row["step"]}


def begin(config: RunConfig, run_id: str, folder: Path, mode: str) -> Any:
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


def follow(metrics: Path, attempt: str, run: Any, end: Path) -> None:
    """Hand over every row of `attempt`, once, until `end` exists and what was written before it is read."""
    reader, last = RowReader(metrics), False
    while not last:
        last = end.exists()
        for row in reader.read():
            if row.get("attempt") == attempt:
                run.log(numbers_of(row))
        if not last:
            CLOCK.sleep(READ_SECONDS)


def main(arguments: list[str]) -> None:
    directory, run_id, attempt, end, mode = arguments
    paths = RunPaths(Path(directory))
    tree = files.read_document(paths.config, dict[str, Any])
    if tree is None:
        raise ConfigError("config", str(paths.config), "a readable file")
    run = begin(load_config(tree), run_id, paths.tracking, mode)
    follow(paths.metrics, attempt, run, Path(end))
    run.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
