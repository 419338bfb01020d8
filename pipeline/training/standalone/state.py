"""What a job that stands alone keeps between its steps and hands on to the next of its kind.

Owns `optimizer_state`: commits of all models with their optimizers below that address (see `pipeline.checkpoints`).
Promises that a job which was interrupted goes on with exactly what it committed; that a new one takes over the moments
of the optimizer, the critic and the reference of the job before it, but neither its policy, its schedule nor any other
setting of AdamW; and that SFT and RL never share a state. Steps are counted over all jobs: `rl-7` is the seventh step
from this state on.

    state = JobState(job, identity, dispatch)
    done = state.find()                # steps of this very job that are committed
    if done: state.restore()
    else: state.inherit()              # after the algorithm has begun
    state.commit(step)
"""

import logging
import secrets
from typing import Any

from pipeline.checkpoints import Checkpoint, Fence, TrainerState, newest_committed
from pipeline.checkpoints.background import saver
from pipeline.checkpoints.sharded import load
from pipeline.errors import CheckpointError
from pipeline.training.commits import COMMIT_SECONDS, start_save
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.dispatch.ranks import Site
from pipeline.training.jobs import Job
from pipeline.training.workers.worker import Worker
from pipeline.waiting import wait_for

log = logging.getLogger(__name__)
KEPT = 2
"""Commits of a state."""
_JOB, _MODELS = "job", "models"


class JobState:
    """The state of one execution of a job, which `identity` names; the newest execution alone may write."""

    def __init__(self, job: Job, identity: str, dispatch: Dispatch) -> None:
        self._job, self._identity, self._dispatch = job, identity, dispatch
        self._attempt = f"{secrets.token_hex(4)}-0"
        self._base = 0
        self._found: Checkpoint | None = None
        self._kept: tuple[str, ...] = ()

    def find(self) -> int:
        """Take the right to write; committed steps of this job. `CheckpointError` for a state of the other kind."""
        root = self._job.optimizer_state
        Fence(root, self._attempt).claim()
        self._found = newest_committed(root, hashes=True)
        if self._found is None:
            return 0
        manifest = self._found.manifest
        if manifest.job != self._job.kind:
            raise CheckpointError(
                f"{root} is the state of {manifest.job} jobs; give this {self._job.kind} job another optimizer_state"
            )
        kept = self._found.state().acknowledge
        self._kept = kept[_MODELS]
        identity, base = kept[_JOB]
        if identity != self._identity:
            self._base = manifest.step
            return 0
        self._base = int(base)
        return manifest.step - self._base

    def restore(self) -> None:
        """Fill all models and optimizers with what this job committed last."""
        self._load(())

    def inherit(self) -> None:
        """Fill what a new job takes over, if there is a state at all; models that it does not hold stay as they are.

        It starts from its checkpoint and at the beginning of its own schedule, for every model.
        """
        if self._found is not None:
            self._load(("policy/model", *(f"{name}/progress" for name in self._dispatch.models)))

    def commit(self, done: int) -> None:
        """Commit all models after `done` steps of this job; durable on return."""
        names: list[str] = []
        for name in self._dispatch.models:
            names += self._dispatch.on_sites(stage_parts, name, needs={name: "save_checkpoint"})[0]
        kept = {_JOB: (self._identity, str(self._base)), _MODELS: tuple(self._dispatch.models)}
        state = TrainerState(job=self._job.kind, step=self._base + done, acknowledge=kept)
        self._dispatch.on_sites(start_save, self._job.optimizer_state, self._attempt, state, names, KEPT)
        wait_for("the commit", lambda: saver.idle, COMMIT_SECONDS)
        log.info("committed %s", saver.result())

    def _load(self, without: tuple[str, ...]) -> None:
        assert self._found is not None
        log.info("taking over %s", self._found)
        for name in self._dispatch.models.keys() & set(self._kept):
            self._dispatch.on_sites(load_parts, self._found, name, without, needs={name: "load_checkpoint"})


def stage_parts(site: Site, name: str) -> list[str]:
    """On every rank: copy a model's state for the save that follows, each part of it under a name of its own."""
    parts = {f"{name}/{part}": tensors for part, tensors in site.worker(name).state().items()}
    for part, tensors in parts.items():
        saver.stage(part, tensors)
    return list(parts)


def load_parts(site: Site, checkpoint: Checkpoint, name: str, without: tuple[str, ...]) -> None:
    """On every rank: fill a model from a checkpoint, but for the parts named."""
    worker = site.worker(name)
    state = worker.state()
    wanted = {f"{name}/{part}": tensors for part, tensors in state.items() if f"{name}/{part}" not in without}
    own = settings_of(worker)
    load(checkpoint, wanted, group=site.background)
    worker.load_state(state)
    if worker.optimizer:
        for group, settings in zip(worker.optimizer.adamw.param_groups, own, strict=True):
            group.update(settings)


def settings_of(worker: Worker) -> list[dict[str, Any]]:
    """Betas, epsilon and weight decay of each group of parameters: a job's own, though they lie beside the moments."""
    groups = worker.optimizer.adamw.param_groups if worker.optimizer else []
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]
