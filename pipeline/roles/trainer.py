"""The trainer role: one torchrun over its nodes, with rank 0 as controller.

Owns its command line and its processes. Rank 0's work is in `pipeline.roles.trainer_session`, for job files in
`pipeline.roles.offline_session`, and for serving the API in `pipeline.roles.tinker_session`.
"""

import os
import sys
from typing import TYPE_CHECKING

from pipeline.errors import first_line
from pipeline.roles import TRAINER, RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.utils.network_interfaces import bound_to
from pipeline.utils.shared_dir import FileSharedDir

if TYPE_CHECKING:
    from pipeline.roles.rank0 import Rank0
    from pipeline.train.controller.rank_group import RankGroup

BELOW_NORMAL = "1"
"""The priority of a colocated trainer's kernels where a user runs NVIDIA's Multi-Process Service: a server's many small
kernels pass the trainer's large ones. The variable has no effect without the service."""


def launch(context: RoleContext) -> RoleCommand:
    """One torchrun agent per trainer node; static rendezvous at the first node's held port."""
    trainers, resources = context.world.of_role("trainer"), context.config.resources.trainer
    master = trainers[0]
    argv = (
        *(sys.executable, "-P", "-m", "pipeline.roles.held_port", str(master.ports[0]), "torch.distributed.run"),
        *("--nnodes", str(len(trainers)), "--node-rank", str(context.placement.index)),
        *("--nproc-per-node", str(resources.processes), "--max-restarts", "0"),
        *("--master-addr", master.address, "--master-port", str(master.ports[0])),
        *("-m", "pipeline.roles.trainer", *context.arguments()),
    )
    env = {"OMP_NUM_THREADS": str(resources.threads), "TOKENIZERS_PARALLELISM": "false"}
    if context.placement.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, context.placement.gpus))
    if context.config.resources.colocate:
        env["CUDA_MPS_CLIENT_PRIORITY"] = os.environ.get("CUDA_MPS_CLIENT_PRIORITY", BELOW_NORMAL)
    env |= bound_to(context.placement.address)
    return RoleCommand(
        argv=argv,
        env=env,
        has_heartbeat=resources.processes,
        ready=lambda: is_ready(context),
        stage=TRAINER,
        nests=True,
        reports_state=context.placement.rank != master.rank,
    )


def is_ready(context: RoleContext) -> bool:
    """Whether rank 0 has reported that it is ready; the other nodes follow it."""
    master = RoleContext(context.paths, context.config, context.world, context.world.of_role("trainer")[0])
    FileSharedDir(context.paths.statuses).names()  # listing the folder makes NFS look for the report again
    return master.is_ready()


def session_of(context: RoleContext, dispatch: "RankGroup") -> "Rank0":
    """Rank 0's session in this attempt."""
    if context.config.serve.enabled:
        from pipeline.roles.tinker_session import TinkerSession

        return TinkerSession(context, dispatch)
    if context.config.training.jobs:
        from pipeline.roles.offline_session import OfflineSession

        return OfflineSession(context, dispatch)
    from pipeline.roles.trainer_session import RunSession

    return RunSession(context, dispatch)


def main(arguments: list[str]) -> None:
    from pipeline.train.controller.lead_or_serve import run_role_of_rank
    from pipeline.train.controller.rank_group import RankGroup
    from pipeline.train.controller.rank_process import end_with_lost_ranks
    from pipeline.utils import heartbeat, subprocesses

    subprocesses.exit_with_parent()
    heartbeat.start(int(os.environ["LOCAL_RANK"]))  # as torchrun sets it
    end_with_lost_ranks()
    context = RoleContext.from_arguments(arguments)
    context.configure_logs()
    context.wait_for_debugger(int(os.environ["RANK"]))

    def lead(dispatch: RankGroup) -> None:
        try:
            session_of(context, dispatch).run()
        except Exception as error:
            context.report_failure(error, first_line(error))
            raise

    subprocesses.exit_after(lambda: run_role_of_rank(context.config, context.world.secret, lead))


if __name__ == "__main__":
    main(sys.argv[1:])
