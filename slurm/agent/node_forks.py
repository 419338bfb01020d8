"""The fork server of a node, which starts importing the roles' modules while the ranks still meet.

Owns the decision which server an agent uses: that of its local job, whose virtual nodes share the one of their
launcher or controller, or its own. Promises that an agent without a server starts its roles with exec.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.roles.preloads import ready_stages, stages_of
from pipeline.topology.plan import Plan, RoleName
from pipeline.utils.fork_server import VARIABLE
from pipeline.utils.forked_process import ForkServer
from slurm.agent.tmpdir import folder_variables


@contextmanager
def node_forks(
    config: RunConfig, roles: Iterable[RoleName], variables: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """The address of a fork server that prepares for these roles, while the block runs; empty without one."""
    if VARIABLE in variables:
        yield variables[VARIABLE]
        return

    def folders(folder: Path) -> dict[str, str]:  # some libraries read those of their caches when they are imported
        return folder_variables(folder, variables, config.cluster.compile_cache)

    with ExitStack() as stack:
        address = ""
        try:
            server = ForkServer.start(stages_of(config), ready_stages(roles), variables, folders)
            address = stack.enter_context(server).address
        except OSError as error:
            print(f"rollcall: roles start without a fork server: {error}", flush=True)
        yield address


def roles_of(plan: Plan, ranks: Iterable[int]) -> list[RoleName]:
    """The roles of the bundles with these ranks' numbers: what the ranks run, unless the leader decides otherwise.

    Which roles a rank gets is unknown before the ranks have met. A server that has prepared for others makes the
    missing stage when it is requested.
    """
    return [process.role for rank in ranks if rank < len(plan.bundles) for process in plan.bundles[rank].roles]
