"""Where a role stores samples. Owns the fractions of `rollout.sample_store_bytes` for training and for evaluations."""

from pipeline.checkpoints import Fence, root_of
from pipeline.roles.role_context import RoleContext
from pipeline.rollout.sample_store import DISK_FRACTIONS, SampleStore


def sample_store_for(context: RoleContext, kind: str) -> SampleStore:
    """The sample store of this attempt for one kind, `train` or `eval`; to be opened as a context."""
    bound = int(DISK_FRACTIONS[kind] * context.config.rollout.sample_store_bytes)
    fence = Fence(root_of(context.config, context.run, context.paths.run_id), context.paths.attempt, any_restart=True)
    return SampleStore(context.run.rollouts / kind, context.paths.attempt, bound, fence.check)
