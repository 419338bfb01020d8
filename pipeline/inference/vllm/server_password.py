"""The password of a server, for the server's own processes.

It is derived from the attempt's world, a file that only its owner may read. An environment variable would stay readable
in /proc/<pid>/environ until the process ends, for all processes of the same user.
"""

import os
from functools import cache
from pathlib import Path

from pipeline.errors import RendezvousError
from pipeline.topology.plan import World
from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient

WORLD = "ROLLCALL_WORLD"
"""The environment variable with the path of the attempt's world."""


@cache
def server_password() -> str:
    """The password of the attempt that started this process; `RendezvousError` if its world cannot be read."""
    path = Path(os.environ.get(WORLD, ""))
    world = (
        retry_transient("the world", lambda: shared_files.read_document(path, World), FINAL_WRITE_TIMEOUT)
        if path.name
        else None
    )
    if world is None:
        raise RendezvousError(f"no readable world at {WORLD}={path}: this server was not started by an agent")
    return world.password
