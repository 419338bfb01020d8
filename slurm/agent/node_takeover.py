"""The replacement of a lost node by a spare one, while the attempt continues.

Owns the steps after a rank is lost: the next revision of the world, the lost agent's exit marker, and a notice. Whoever
detects the loss performs them: the agent that monitors the rank, or the controller of a local job. Promises that of
several observers one publishes the revision, and that an attempt which cannot continue is left as it was.

    replaced, why = replace_lost_node(paths, config, rank, "killed by SIGKILL", "agent.0")
    if not replaced: …                        # the attempt fails, and its failure has the reason

Every agent follows the revisions (`WorldFollower`): the spare starts the roles, the others know their new addresses,
and the lost agent, if it still runs behind a partition, kills its roles and publishes nothing more.
"""

from contextlib import suppress

from pipeline.config import RunConfig
from pipeline.errors import TakeoverError
from pipeline.roles.role_context import RoleContext
from pipeline.roles.world_revisions import WorldRevisions
from pipeline.run.events import Events
from pipeline.run.notices import publish_notice
from pipeline.run.paths import AttemptPaths
from pipeline.run.poll_rates import ReadSchedule
from pipeline.topology.plan import Placement, World
from pipeline.topology.takeover import take_over
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.agent_heartbeat import mark_down

RESTARTS_PER_LOSS = 1000
"""The distance of a role's restart numbers on a spare node from those before. A trainer's process there has a higher
number than any on the lost node, so the checkpoints and records of the old one are refused
(`pipeline.checkpoints.fencing`)."""


def replace_lost_node(paths: AttemptPaths, config: RunConfig, rank: int, cause: str, by: str) -> tuple[bool, str]:
    """Whether the attempt continues without a rank, and the reason why it does not (empty without spare nodes)."""
    if config.serve.enabled or config.evaluation.only or config.training.jobs:
        return False, ""  # clients of its servers know the addresses of the first world, and job files restart alone
    revisions = WorldRevisions(paths, FileSharedDir(paths.rendezvous, FINAL_WRITE_TIMEOUT))
    while (world := revisions.newest()) is not None and not world.has_lost(rank):
        if not (world.spares or world.losses) or Events(paths).read_all():
            return False, ""
        try:
            following = take_over(world, rank, cause, limit=config.recovery.nodes)
        except TakeoverError as refused:
            return False, str(refused)
        if revisions.publish(following):
            # Nobody waits for the lost agent's exit any more.
            mark_down(FileSharedDir(paths.root), rank)
            publish_notice(paths, by, describe_loss(following))
            return True, ""
    return world is not None, ""


def describe_loss(world: World) -> str:
    """The last loss of a world, in one line."""
    loss = world.losses[-1]
    if loss.spare is None:
        return f"rank {loss.rank}, which had no roles, is lost: {loss.cause}"
    names = ", ".join(placement.name for placement in world.of_rank(loss.spare))
    return f"rank {loss.spare} takes over {names} of rank {loss.rank}, which is lost: {loss.cause}"


class WorldFollower:
    """The revisions of the world, as one agent observes them."""

    def __init__(self, paths: AttemptPaths, config: RunConfig, rank: int, schedule: ReadSchedule) -> None:
        """`schedule` determines when the directory is listed."""
        self._revisions, self._schedule = WorldRevisions(paths), schedule
        self._paths, self._config, self.rank = paths, config, rank
        self._revision = 0

    def poll(self) -> World | None:
        """A new revision; None while there is none, or the disk fails."""
        if not self._schedule.is_due():
            return None
        self._schedule.begin()
        with suppress(OSError):
            world = self._revisions.newest()
            self._schedule.finish(world.revision if world is not None else 0)
            if world is not None and world.revision > self._revision:
                self._revision = world.revision
                return world
        return None

    def is_replaced(self) -> bool:
        """Whether this rank is lost for the others, as the disk has it now; `OSError` if the disk fails."""
        world = self._revisions.newest()
        return world is not None and world.has_lost(self.rank)

    def context(self, world: World, placement: Placement) -> RoleContext:
        """The context of a role that this rank takes over."""
        return RoleContext(self._paths, self._config, world, placement, RESTARTS_PER_LOSS * world.revision)
