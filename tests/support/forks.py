"""A fork server for all tests of a session: the roles that they start need not import torch and vLLM again.

The process that reports starts it, and its workers find it in their environment. It imports with its first request.
Without it, as in a test that is started by hand from another program, everything starts with exec.
"""

import os
from itertools import chain

from pipeline.roles.preloads import stages_of
from pipeline.utils.fork_server import Stage
from pipeline.utils.forked_process import ForkRequest, ForkServer
from tests.fakes.configs import make_config

VARIABLE = "ROLLCALL_TESTS_FORK_SERVER"
_ALL = "all"


def start_server() -> ForkServer:
    """Start the session's server, which imports nothing until it is asked for a process."""
    stages = stages_of(make_config())
    modules = tuple(chain.from_iterable(stage.modules for stage in stages))
    variables = {name: value for stage in stages for name, value in stage.variables.items()}
    return ForkServer.start([Stage("none", ()), Stage(_ALL, modules, variables)], ready=0)


def request() -> ForkRequest | None:
    """How to ask the session's server for a role; None without a server."""
    return ForkRequest.of(os.environ.get(VARIABLE, ""), _ALL, nests=False)
