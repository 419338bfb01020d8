"""Export of a run's checkpoint as a model directory for transformers, peft and vLLM.

Promises that a directory with the name of the target is complete, and that the run may continue meanwhile: only the
target is written.

    python -m pipeline.train.loop.checkpoint_export <run directory> rl-50 <target>

It takes one process on the CPU, and memory for two float32 copies of the model's weights. No optimizer is read.
"""

import os
import secrets
import sys
from pathlib import Path

from pipeline.checkpoints import Checkpoint, complete_checkpoints, recorded_root
from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.model_directory import model_directory
from pipeline.errors import CheckpointError, RollcallError
from pipeline.run.paths import RunPaths
from pipeline.utils import atomic_dirs

_OFFLINE_KEYS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The environment that torchrun would set for a world of one process."""


def find_checkpoint(run: RunPaths, name: str) -> Checkpoint:
    """The checkpoint `<job>-<step>` of a run, or the newest for `latest`; `CheckpointError` lists the existing ones."""
    checkpoints = list(complete_checkpoints(recorded_root(run)))
    chosen = next((checkpoint for checkpoint in checkpoints if name in (checkpoint.name, "latest")), None)
    if chosen is None:
        existing = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
        raise CheckpointError(f"{run.root.name} has no commit {name}; there are: {existing}")
    return chosen


def export_command(run: RunPaths, name: str, target: Path) -> list[str]:
    """The command that writes the checkpoint `name` as `target`. An unfinished directory has the name that
    `pipeline.utils.atomic_dirs` derives from the process id."""
    return [sys.executable, "-P", "-m", "pipeline.train.loop.checkpoint_export", str(run.root), name, str(target)]


def export_checkpoint(config: RunConfig, checkpoint: Checkpoint, target: Path) -> None:
    """Write the policy of a checkpoint as `target`; for a run with adapters, the adapter alone."""
    from pipeline.train.batching.packing import Budget
    from pipeline.train.controller.lead_or_serve import run_controller_or_worker
    from pipeline.train.controller.model_saving import load_models
    from pipeline.train.controller.rank_group import RankGroup
    from pipeline.train.worker_spec import ModelSpec

    def lead(dispatch: RankGroup) -> None:
        dispatch.init_model("policy", ModelSpec("policy", config.model, seed=config.seed))
        load_models(dispatch, checkpoint, ["policy"])
        part = atomic_dirs.unfinished(target, str(os.getpid()))
        dispatch.save_hf_model("policy", part)
        atomic_dirs.replace(target, part)

    os.environ.update(_OFFLINE_KEYS)
    target.parent.mkdir(parents=True, exist_ok=True)
    run_controller_or_worker(lead, Budget(config.model.max_length), secret=secrets.token_hex(16))


def main(arguments: list[str]) -> int:
    run, name, target = RunPaths(Path(arguments[0])), arguments[1], Path(arguments[2])
    try:
        config = read_frozen_config(run)
        if config is None:
            raise CheckpointError(f"{run.config} cannot be read")
        located = config.model.model_copy(update={"path": str(model_directory(config.model))})
        export_checkpoint(config.model_copy(update={"model": located}), find_checkpoint(run, name), target)
    except RollcallError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
