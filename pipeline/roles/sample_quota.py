"""Where a role keeps samples. Owns the shares that training and evaluations have of `rollout.sample_store_bytes`."""

from pipeline.checkpoints import Fence, root_of
from pipeline.roles.role_context import RoleContext
from pipeline.rollout.sample_store import DISK_FRACTIONS, SampleStore


def sample_store_for(context: RoleContext, kind: str) -> SampleStore:
    """The samples of this attempt of one kind, `train` or `eval`; to be entered."""
    bound = int(DISK_FRACTIONS[kind] * context.config.rollout.sample_store_bytes)
    fence = Fence(root_of(context.config, context.run, context.paths.run_id), context.paths.attempt)
    return SampleStore(context.run.rollouts / kind, context.paths.attempt, bound, fence.check)
