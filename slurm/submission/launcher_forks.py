"""The fork server of a local run, which starts importing the roles' modules while the launcher still checks the run.

Owns the start and the end of this server, and the calls of functions that need torch. Promises that the server ends
with the block, thus before the error of a refused run is printed, and with a launcher that is killed. The job inherits
the address (`VARIABLE`) from the launcher's environment.

    with launcher_forks(config):
        sizes = call_with_torch("pipeline.train.model.model_size", "sizes_of", config.model)
        run_here(config, plan)
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import RollcallError
from pipeline.roles import TRAINER
from pipeline.topology.plan import RoleName
from pipeline.utils.fork_server import VARIABLE
from pipeline.utils.forked_call import forked_call
from slurm.agent.node_forks import node_forks


@contextmanager
def launcher_forks(config: RunConfig) -> Iterator[None]:
    """Prepare for the roles of a run on this machine while the block runs. Does nothing for a scheduler's job."""
    with ExitStack() as stack:
        if config.cluster.on_this_machine and VARIABLE not in os.environ:
            with suppress(RollcallError):  # a mistake that a check of the run reports
                roles: list[RoleName] = ["inference" if config.has_servers else "trainer"]
                if address := stack.enter_context(node_forks(config, roles)):
                    os.environ[VARIABLE] = address
                    stack.callback(os.environ.pop, VARIABLE, None)
        yield


def call_with_torch(module: str, function: str, *arguments: Any) -> Any:
    """Call a function whose module imports torch and transformers: in a fork of a process that has them if there is
    one, else here, which takes seconds for the imports. Raises what the function raises."""
    try:
        return forked_call(os.environ.get(VARIABLE, ""), TRAINER, module, function, *arguments)
    except OSError:
        return getattr(import_module(module), function)(*arguments)
