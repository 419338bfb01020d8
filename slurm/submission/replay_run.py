"""Replay of a run: its recorded samples are trained again, by a run that consists of the trainer alone.

Owns the additions of `launchers/replay.py` to a submission: the replay's config, which is that of the recorded run.
Promises that the recorded run is only read. The same command resumes an interrupted replay.

    python launchers/replay.py run=demo                                all its recorded steps
    python launchers/replay.py run=demo loss=gspo training.steps=20    another loss on the same samples
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import RunConfig, load_config
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError
from pipeline.observability.run_history import find_run
from pipeline.rollout.recorded_groups import RecordedRun
from pipeline.run.paths import RunPaths
from slurm.submission import submit_run
from slurm.submission.compose_config import compose_over, merge_trees
from slurm.submission.train_files import next_name, sibling_output

TRAINER_ONLY: Mapping[str, Any] = {
    "evaluation": {"sets": {}},
    "training": {"eval_every": 0},
    "faults": [],
    "debug": {"profile_steps": [], "memory_steps": []},
    "resources": {"nodes": 0, "spare_nodes": 0, "colocate": False, "hetjob": False, "services": {"nodes": 0}},
}
"""Settings of a replay, which replace those of the recorded run. The user may override them."""


def main(argv: Sequence[str]) -> int:
    """The exit code of `replay.py run=… [options] [key=value …]`."""
    return submit_run.main(argv, compose_replay)


def compose_replay(overrides: Sequence[str]) -> RunConfig:
    """The config of the replay of the run that `run=…` names; `ConfigError` as for every run."""
    named = [text for text in overrides if text.startswith("run=")]
    if not named:
        raise ConfigError("run", None, "a run to replay", "run=<name or directory>")
    run, rest = RunPaths(find_run(named)), [text for text in overrides if text not in named]
    recorded = read_frozen_config(run)
    if recorded is None:
        raise ConfigError("run", run.root.name, "a run with a readable config.json", f"see {run.config}")
    steps = min(recorded.training.steps, RecordedRun(run).steps)  # a run in progress may not have all of them yet
    own = {"name": f"{run.root.name[:50]}-replay", "replay": str(run.root), "training": {"steps": steps}}
    begun = merge_trees(
        recorded.model_dump(mode="json"), {"output": str(sibling_output(run, recorded))}, TRAINER_ONLY, own
    )
    config = load_config(compose_over(begun, rest))
    if any(text.lstrip("+").startswith("name=") for text in rest):
        return config
    return config.model_copy(update={"name": next_name(config.output, config.name)})
