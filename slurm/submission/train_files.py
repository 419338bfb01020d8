"""Training of job files: a run that is named after the file or folder.

Owns the additions of `launchers/train.py` to a submission: the job files and the name of the run. Promises that the
same command resumes its unfinished run, and starts another run once that is finished.

    python launchers/train.py queue/ model.path=models/base
    python launchers/submit.py training.jobs=queue/ training.steps=0 name=queue model.path=models/base      # the same
"""

import re
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run.completion import is_finished
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from slurm.submission import submit_run
from slurm.submission.compose_config import compose_config

_MAX_NAME = 58
"""Characters of a name, so that a number still fits behind it."""


def main(argv: Sequence[str]) -> int:
    """The exit code of `train.py <job file or folder> [options] [key=value …]`."""
    if not argv or argv[0].startswith("-") or ("=" in argv[0] and not shared_files.exists(Path(argv[0]))):
        expected = "a job file, or a folder of them, as the first argument"
        print(f"error: {ConfigError('jobs', None, expected, 'see docs/jobs.md')}", file=sys.stderr)
        return ConfigError.exit_code
    return submit_run.main(argv[1:], partial(compose_jobs, Path(argv[0]).resolve()))


def compose_jobs(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The config of the run that executes the job files of a path; `ConfigError` as for every run."""
    config = compose_config([f"name={name_of(path)}", "training.steps=0", *overrides])
    config = config.model_copy(update={"training": config.training.model_copy(update={"jobs": str(path)})})
    if any(text.lstrip("+").startswith("name=") for text in overrides):
        return config
    return config.model_copy(update={"name": next_name(config.output, config.name)})


def name_of(path: Path) -> str:
    """A run name from the path's stem: characters that a name may not have become `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:_MAX_NAME] or "jobs"


def sibling_output(run: RunPaths, config: RunConfig) -> Path:
    """The parent directory of an existing run; in its config's spelling if that is the same directory."""
    return config.output if config.output.resolve() == run.root.parent else run.root.parent


def next_name(output: Path, name: str) -> str:
    """The first of `name`, `name-2`, `name-3`, … that no finished run has."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(candidate for candidate in names if not is_finished(RunPaths(output / candidate)))
