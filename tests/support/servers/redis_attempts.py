"""Real attempts of a run for tests: a run directory, a world, and the redis role's process as an agent starts it."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis

from pipeline.config import RunConfig, load_config
from pipeline.roles.redis import launch, owner_password
from pipeline.roles.role_context import RoleContext
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.topology.plan import Placement, World
from pipeline.transport import Streams
from pipeline.transport.sample_records import Reissue
from pipeline.utils import shared_files
from pipeline.utils.subprocesses import Child, hold_port, tail
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.servers.redis_binaries import taken_first

ADDRESS = "127.0.0.1"


def numbers(*positions: int) -> list[Reissue]:
    return [Reissue(position=position, reason="test") for position in positions]


def left_in(streams: Streams) -> list[int]:
    return [entry.record.position for entry in streams.scan("reissue", Reissue)]


def a_config(**streams: Any) -> RunConfig:
    """The smallest config; `streams` are keys of its streams section."""
    return load_config(
        {
            "name": "streams",
            "cluster": {"scheduler": "local"},
            "model": {"path": "tiny_qwen3", "init": "random"},
            "task": {"name": "arithmetic"},
            "loss": {"name": "grpo"},
            "training": {"steps": 1, "prompts_per_step": 1},
            "streams": streams,
        }
    )


def redis_context(run: Path, attempt: str, port: int, config: RunConfig | None = None) -> RoleContext:
    """The redis role's place in a new attempt; writes the config and the world that its process reads."""
    config = config or a_config()
    paths = AttemptPaths(run, "run-1", attempt)
    place = Placement(role="redis", index=0, rank=0, address=ADDRESS, ports=(port,))
    world = World(run_id="run-1", attempt=attempt, epoch=1, leader=0, secret=secrets.token_hex(16), placements=(place,))
    shared_files.write_document(RunPaths(run).config, config.model_dump(mode="json"))
    shared_files.write_document(paths.rendezvous / "world.json", world)
    return RoleContext(paths, config, world, place)


def raw_client(context: RoleContext) -> redis.Redis:
    """Redis without our streams, as its owner."""
    (path,) = re.findall(r'^unixsocket "(.*)"$', (context.paths.redis / "redis.conf").read_text(), re.M)
    password = owner_password(context.world)
    return redis.Redis(unix_socket_path=path, username="owner", password=password, protocol=2)


def a_child_of(context: RoleContext, scratch: str) -> Child:
    """The role's process as an agent starts it, not yet ready; `scratch` is its folder for temporary files."""
    asked = launch(context)
    return Child(asked.argv, context.paths.log("redis", 0), {**os.environ, **asked.env, "TMPDIR": scratch})


@contextmanager
def running_redis(context: RoleContext) -> Iterator[Child]:
    """The role's process, ready; stopped afterwards if the test has not ended it."""
    with TemporaryDirectory(prefix="tests-") as scratch:
        asked, child = launch(context), a_child_of(context, scratch)
        try:
            wait_for("redis to be ready or to fail", lambda: asked.ready() or child.poll() is not None, WAIT_SECONDS)
            assert child.poll() is None, "\n".join(tail(child.log))
            yield child
        finally:
            child.stop(5)


@contextmanager
def a_redis(run: Path, attempt: str, config: RunConfig | None = None) -> Iterator[tuple[RoleContext, Child]]:
    """A ready redis role on a port that is held as an agent holds it."""
    with hold_port() as holder:
        context = redis_context(run, attempt, holder.getsockname()[1], config)
        with running_redis(context) as child:
            yield context, child


@contextmanager
def an_attempt(run: Path, backend: str, budget: int = 1 << 20) -> Iterator[RoleContext]:
    """An attempt whose streams can be connected to: in `files`, in `redis`, or in one of `redis_servers`."""
    if backend == "files":
        yield redis_context(run, "7-0", 1, a_config(backend="files", budget_bytes=budget))
        return
    with (
        nullcontext() if backend == "redis" else taken_first(backend),
        a_redis(run, "7-0", a_config(budget_bytes=budget)) as (context, _),
    ):
        yield context


def copy_of(context: RoleContext) -> Path:
    """A copy of the data as it is now, for `go_back`."""
    wait_until_written(context)
    kept = context.paths.run / "kept"
    shutil.copytree(context.paths.redis, kept)
    return kept


def go_back(context: RoleContext, kept: Path) -> None:
    """Give a Redis that was killed the data of then: it has lost its last writes."""
    shutil.rmtree(context.paths.redis)
    kept.rename(context.paths.redis)


def wait_until_written(context: RoleContext) -> None:
    """Return once Redis has given all it was told to the kernel: while it flushes the disk it may hold that back."""
    with raw_client(context) as client:
        wait_for("Redis to write", lambda: client.info("persistence")["aof_buffer_length"] == 0, WAIT_SECONDS)
