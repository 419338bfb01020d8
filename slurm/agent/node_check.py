"""The GPUs of this node that a rank uses, and the node's problems, before the rendezvous.

Promises that a rank of a machine without a scheduler holds a claim on each of its GPUs until `resources` is closed.
"""

import logging
from contextlib import ExitStack

from pipeline.config import RunConfig
from pipeline.run.paths import AttemptPaths
from pipeline.topology.plan import Plan
from slurm.agent.gpu_locks import Claimant, claim_visible
from slurm.agent.preflight import Gpu, NodeRequirements, find_gpus, open_files_warning, parts_of_gpus, preflight
from slurm.scheduler.rank_environment import Environment

log = logging.getLogger(__name__)


def find_node(
    paths: AttemptPaths, plan: Plan, environment: Environment, resources: ExitStack, needs_mps: bool = False
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The GPUs that this rank may use, and the node's problems.

    A scheduler allocates the GPUs of a job, so each must be free. A virtual node claims as many free GPUs as it needs.
    """
    needs, visible = [bundle.gpus for bundle in plan.bundles], environment.visible_gpus
    if environment.allocated:
        gpus, problem = find_gpus(visible), parts_of_gpus(visible) if any(needs) else ""
    else:
        claimant = Claimant(run_id=paths.run_id, attempt=paths.attempt, rank=environment.rank)
        claimed = claim_visible(visible, needs, claimant, resources)
        gpus, problem = claimed.gpus, claimed.problem
    unfit = preflight(paths.run, gpus, NodeRequirements(free_gpus=any(needs), mps=needs_mps))
    return gpus, (*unfit, problem) if problem else unfit


def warn_of_open_files(plan: Plan, config: RunConfig) -> None:
    """Log a warning if the actor of a run may lack open files. Its children inherit the limit of this process."""
    rollout = config.rollout
    if any(process.role == "actor" for bundle in plan.bundles for process in bundle.roles):
        episodes = rollout.concurrency * (rollout.group_size + rollout.oversample)
        if warning := open_files_warning(episodes):
            log.warning("%s", warning)
