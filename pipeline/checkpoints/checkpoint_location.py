"""Where a run keeps its checkpoints.

Owns the one rule that turns `training.checkpoints` into an address: below a URL every run has a folder of its own,
named by its run_id, which begins with the run's name; without one they are in the run directory. Promises that whoever
looks at a run's checkpoints, on whatever node, looks at the same place.
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
    """The same, as the run directory tells it. `CheckpointError` if it has a URL and does not say whose run this is."""
    config = read_frozen_config(run)
    if config is None or not config.training.checkpoints:
        return str(run.checkpoints)
    identity = shared_files.read_document(run.run, RunIdentity)
    if identity is None:
        raise CheckpointError(f"{run.run} cannot be read, so its folder in {config.training.checkpoints} is not known")
    return root_of(config, run, identity.run_id)


def log_newest(run: RunPaths, found: str, otherwise: str) -> str:
    """For people: `found` with the newest commit for its `{}`, or `otherwise` when there is none.

    A place that cannot be reached from here is said to be so, and is no error. Jobs of files commit where they say.
    """
    config = read_frozen_config(run)
    if config is not None and config.training.jobs:
        return found.format("the last commit of each job")
    try:
        checkpoint = newest_checkpoint(recorded_root(run))
    except CheckpointError as error:
        return f"its checkpoints cannot be seen from here ({error})"
    return found.format(checkpoint) if checkpoint else otherwise
