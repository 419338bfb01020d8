"""Checkpoints of offline jobs, and the optimizer state that one job inherits from the job before.

Owns `optimizer_state`: the checkpoints of all models with their optimizers below that address (see
`pipeline.checkpoints`). Promises that an interrupted job continues with exactly its last checkpoint. A new job inherits
the moments of the optimizers, the critic and the reference model of the job before it, but not its policy, its schedule
or other settings of AdamW. SFT and RL never share a state. Steps are counted over all jobs of a state: `rl-7` is the
seventh step since its beginning.

    state = JobState(job, identity, dispatch)
    state.claim()                      # before any file of the job is read, repaired or written
    done = state.find()                # completed steps of this job in its last checkpoint
    if done: state.restore()
    else: state.inherit()              # after the algorithm has begun
    state.save_checkpoint(step)
    state.check()                      # before any other write to files that a later execution could own
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
MAX_CHECKPOINTS = 2
"""Checkpoints of a state that are kept; older ones are deleted."""


class JobState:
    """The state of the job `identity`, for one execution of it; only the newest execution may write.

    `attempt` is the unique name of this execution.
    """

    def __init__(self, job: Job, identity: str, dispatch: RankGroup) -> None:
        self._job, self._identity, self._dispatch = job, identity, dispatch
        self.attempt = f"{secrets.token_hex(4)}-0"
        self._fence = Fence(job.optimizer_state, self.attempt)
        self._base = 0
        self._commits: list[Checkpoint] | None = None
        self._newest_state: TrainerState | None = None

    def claim(self) -> None:
        """Take the right to write, from other executions of this job and from other jobs of this state."""
        self._fence.claim()

    def check(self) -> None:
        """Raise `SupersededError` if another execution has claimed the state since `claim`."""
        self._fence.check()

    @contextmanager
    def unless_overtaken(self) -> Iterator[None]:
        """A block whose errors become `SupersededError` if another execution has claimed the state: that execution may
        have caused them, such as by removing files."""
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
                log.warning("the owner of the job's state cannot be determined: %s", unreadable)
            raise error

    def find(self) -> int:
        """Completed steps of this job, from the newest checkpoint that is not known to be damaged; 0 for a new job.

        `CheckpointError` for a state of another kind of job, and for one whose checkpoints are all damaged.
        """
        root, self._base = self._job.optimizer_state, 0
        self._newest_state = self._newest()
        if self._newest_state is None:
            refuse_damaged_state(root)
            return 0
        if self._newest_state.job != self._job.kind:
            raise CheckpointError(
                f"{root} is the state of {self._newest_state.job} jobs; "
                f"give this {self._job.kind} job another optimizer_state"
            )
        if self._newest_state.alone is None:
            raise CheckpointError(f"{root} holds the checkpoints of a run; give this job another optimizer_state")
        if self._newest_state.alone.identity != self._identity:
            self._base = self._newest_state.step
            return 0
        self._base = self._newest_state.alone.before
        return self._newest_state.step - self._base

    def restore(self) -> None:
        """Load this job's last checkpoint into all models and optimizers.

        `DamagedCheckpointError` if a rank reads other content than was saved; then begin again with new models, and
        `find` skips this checkpoint.
        """
        self._load(())

    def inherit(self) -> None:
        """Load the inherited part of the state into a new job's models; without a state, nothing.

        The policy's parameters stay those of the job's `checkpoint`, and every schedule starts at its beginning. Models
        that are not in the state are unchanged. Raises the errors of `restore`.
        """
        self._load(("policy/model", *(f"{name}/progress" for name in self._dispatch.models)))

    def save_checkpoint(self, done: int) -> None:
        """Save all models after `done` steps of this job; durable on return."""
        names = tuple(self._dispatch.models)
        parts = stage_models(self._dispatch, names)
        alone = OfflineProgress(identity=self._identity, before=self._base)
        state = TrainerState(job=self._job.kind, step=self._base + done, models=names, alone=alone)
        start_save(self._dispatch, self._job.optimizer_state, self.attempt, state, parts, MAX_CHECKPOINTS)
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
        """Load the newest checkpoint, if there is one; then only the known checkpoints stay valid."""
        commits = self._commits or []
        if self._newest_state is not None:
            log.info("taking over %s", commits[0])
            names = [name for name in self._dispatch.models if name in self._newest_state.models]
            try:
                load_models(self._dispatch, commits[0], names, without)
            except DamagedCheckpointError as damage:
                self._refuse(damage)
                raise
        self._fence.keep(commit.folder for commit in commits)
        remove_unfinished(self._job.optimizer_state, self.attempt)

    def _refuse(self, damage: DamagedCheckpointError) -> None:
        assert self._commits
        log.warning("%s is refused, now and in later executions: %s", self._commits.pop(0).name, damage)
