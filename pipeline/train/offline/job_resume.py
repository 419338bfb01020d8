"""What a job that stands alone keeps between its steps and hands on to the next of its kind.

Owns `optimizer_state`: commits of all models with their optimizers below that address (see `pipeline.checkpoints`).
Promises that a job which was interrupted goes on with exactly what it committed; that a new one takes over the moments
of the optimizer, the critic and the reference of the job before it, but neither its policy, its schedule nor any other
setting of AdamW; and that SFT and RL never share a state. Steps are counted over all jobs: `rl-7` is the seventh step
from this state on.

    state = JobState(job, identity, dispatch)
    state.claim()                      # before anything of the job is read, mended or written
    done = state.find()                # steps of this very job that are committed
    if done: state.restore()
    else: state.inherit()              # after the algorithm has begun
    state.commit(step)
    state.check()                      # before anything else that another execution could be at work on
"""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.checkpoints import (
    Checkpoint,
    Fence,
    OfflineProgress,
    TrainerState,
    complete_checkpoints,
    remove_unfinished,
)
from pipeline.checkpoints.run_progress import refuse_damaged_state
from pipeline.errors import CheckpointError, DamagedCheckpointError, SupersededError
from pipeline.train.controller.model_saving import await_save, load_models, stage_models, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.train_jobs import Job

log = logging.getLogger(__name__)
KEPT_STATES = 2
"""Commits of a state."""


class JobState:
    """The state of one execution of a job, which `identity` names; the newest execution alone may write.

    `attempt` is a name of this execution that no other has.
    """

    def __init__(self, job: Job, identity: str, dispatch: RankGroup) -> None:
        self._job, self._identity, self._dispatch = job, identity, dispatch
        self.attempt = f"{secrets.token_hex(4)}-0"
        self._fence = Fence(job.optimizer_state, self.attempt)
        self._base = 0
        self._commits: list[Checkpoint] | None = None
        self._found: TrainerState | None = None

    def claim(self) -> None:
        """Take the right to write, from other executions of this job and from other jobs of this state."""
        self._fence.claim()

    def check(self) -> None:
        """Raise `SupersededError` if another execution has claimed the state since."""
        self._fence.check()

    @contextmanager
    def unless_overtaken(self) -> Iterator[None]:
        """A block whose errors are all `SupersededError` once another execution has claimed the state: files that are
        gone, for instance, are then that one's doing."""
        try:
            yield
        except SupersededError:
            raise
        except Exception as error:
            try:
                self.check()
            except SupersededError:
                raise
            except CheckpointError as unreadable:
                log.warning("whether another execution has taken over is not known: %s", unreadable)
            raise error

    def find(self) -> int:
        """Committed steps of this job, in the newest commit that is not known to be damaged.

        `CheckpointError` for a state of the other kind, and for one whose commits are all damaged.
        """
        root, self._base = self._job.optimizer_state, 0
        self._found = self._newest()
        if self._found is None:
            refuse_damaged_state(root)
            return 0
        if self._found.job != self._job.kind:
            raise CheckpointError(
                f"{root} is the state of {self._found.job} jobs; give this {self._job.kind} job another optimizer_state"
            )
        if self._found.alone is None:
            raise CheckpointError(f"{root} holds the checkpoints of a run; give this job an optimizer_state of its own")
        if self._found.alone.identity != self._identity:
            self._base = self._found.step
            return 0
        self._base = self._found.alone.before
        return self._found.step - self._base

    def restore(self) -> None:
        """Fill all models and optimizers with what this job committed last.

        `DamagedCheckpointError` if a rank reads something else than that: then begin again, with new models. `find`
        goes past it.
        """
        self._load(())

    def inherit(self) -> None:
        """Fill what a new job takes over, if there is a state at all; models that it does not hold stay as they are.

        It starts from its checkpoint and at the beginning of its own schedule, for every model. Raises as `restore`.
        """
        self._load(("policy/model", *(f"{name}/progress" for name in self._dispatch.models)))

    def save_checkpoint(self, done: int) -> None:
        """Commit all models after `done` steps of this job; durable on return."""
        names = tuple(self._dispatch.models)
        parts = stage_models(self._dispatch, names)
        alone = OfflineProgress(identity=self._identity, before=self._base)
        state = TrainerState(job=self._job.kind, step=self._base + done, models=names, alone=alone)
        start_save(self._dispatch, self._job.optimizer_state, self.attempt, state, parts, KEPT_STATES)
        await_save(self._dispatch, f"the commit of {state.job}-{state.step}")
        log.info("committed %s", self._dispatch.saver.result())

    def _newest(self) -> TrainerState | None:
        if self._commits is None:
            self._commits = list(complete_checkpoints(self._job.optimizer_state))
        while self._commits:
            try:
                return self._commits[0].state()
            except DamagedCheckpointError as damage:
                self._refuse(damage)
        return None

    def _load(self, without: tuple[str, ...]) -> None:
        """Fill models with what was found, if there is something, and have no other commit but those count."""
        commits = self._commits or []
        if self._found is not None:
            log.info("taking over %s", commits[0])
            names = [name for name in self._dispatch.models if name in self._found.models]
            try:
                load_models(self._dispatch, commits[0], names, without)
            except DamagedCheckpointError as damage:
                self._refuse(damage)
                raise
        self._fence.keep(commit.place for commit in commits)
        remove_unfinished(self._job.optimizer_state, self.attempt)

    def _refuse(self, damage: DamagedCheckpointError) -> None:
        assert self._commits
        log.warning("%s is refused, now and in later executions: %s", self._commits.pop(0).name, damage)
