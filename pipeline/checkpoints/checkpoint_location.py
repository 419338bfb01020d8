"""The address of a run's checkpoints, the same on every node.

If `training.checkpoints` is a URL, every run has a folder below it, named by the run_id (which begins with the run's
name). If it is empty, the checkpoints are in the run directory.
"""

from pipeline.checkpoints.checkpoint_store import newest_checkpoint
from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import CheckpointError
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files


def root_of(config: RunConfig, run: RunPaths, run_id: str) -> str:
    """The URL (or path) of the folder that holds the run's checkpoints."""
    below = config.training.checkpoints.rstrip("/")
    return f"{below}/{run_id}" if below else str(run.checkpoints)


def recorded_root(run: RunPaths) -> str:
    """The address of a run's checkpoints, read from its directory. `CheckpointError` if a URL needs a lost run_id."""
    config = read_frozen_config(run)
    if config is None or not config.training.checkpoints:
        return str(run.checkpoints)
    identity = shared_files.read_document(run.run, RunIdentity)
    if identity is None:
        raise CheckpointError(f"{run.run} cannot be read, so its folder in {config.training.checkpoints} is not known")
    return root_of(config, run, identity.run_id)


def log_newest(run: RunPaths, template: str, default: str) -> str:
    """A message: `template` with the newest checkpoint for its `{}`, or `default` if there is none.

    If the folder cannot be reached from this machine, the message reports it; no error is raised. Jobs of files have
    checkpoints in several folders, which are not listed.
    """
    try:
        config = read_frozen_config(run)
        if config is not None and config.training.jobs:
            return template.format("the last checkpoint of each job")
        checkpoint = newest_checkpoint(recorded_root(run))
    except (CheckpointError, OSError) as error:
        return f"its checkpoints cannot be seen from here ({error})"
    return template.format(checkpoint) if checkpoint else default
