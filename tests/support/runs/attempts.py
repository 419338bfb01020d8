"""A whole attempt for tests: a world with a real Redis, in which roles are started as agents start them."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.roles.role_context import RoleContext
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.topology.plan import Placement, RoleName, World
from pipeline.transport import Streams, connect
from pipeline.utils import shared_files
from pipeline.utils.subprocesses import Child, hold_port, tail
from pipeline.utils.waiting import wait_for
from slurm.agent.supervisor import role_command
from tests.support import forks
from tests.support.servers.redis_attempts import ADDRESS, running_redis

READY_SECONDS = 240
STOP_SECONDS = 5
_SECRET = secrets.token_hex(16)


@dataclass
class Attempt:
    """One attempt whose Redis runs; other roles are started on demand and stopped at its end."""

    paths: AttemptPaths
    config: RunConfig
    world: World
    children: list[Child] = field(default_factory=list)
    redis: Child = field(init=False)

    def context(self, role: RoleName) -> RoleContext:
        """The place of the first of a role."""
        (place, *_) = self.world.of_role(role)
        return RoleContext(self.paths, self.config, self.world, place)

    def connect(self) -> Streams:
        """The attempt's streams, as one of its roles sees them."""
        return connect(self.context("redis"))

    def start(self, role: RoleName, variables: Mapping[str, str] | None = None) -> Child:
        """The process of a role, ready; `variables` are further ones of its environment."""
        context = self.context(role)
        self.paths.status(context.placement.name).unlink(missing_ok=True)
        asked = role_command(context)
        environment = {**os.environ, **asked.env, **(variables or {})}
        child = Child(
            asked.argv, self.paths.log(role, 0), environment, forks.request(asked.stage) if not variables else None
        )
        self.children.append(child)
        wait_for(f"{role} to be ready or to fail", lambda: asked.ready() or child.poll() is not None, READY_SECONDS)
        assert not child.poll(), "\n".join(tail(child.log))  # what has little to do may be done already
        return child


@contextmanager
def an_attempt(
    run: Path, config: RunConfig, servers: tuple[tuple[str, int], ...] = (), name: str = "7-0"
) -> Iterator[Attempt]:
    """An attempt in the run directory `run`; `servers` are the addresses and ports of its inference servers."""
    with hold_port() as holder, ExitStack() as stack:
        placements = [Placement(role="redis", index=0, rank=0, address=ADDRESS, ports=(holder.getsockname()[1],))]
        for index, (address, port) in enumerate(servers):
            placements.append(Placement(role="inference", index=index, rank=0, address=address, ports=(port,)))
        for role in ("actor", "preprocessor"):
            placements.append(Placement(role=role, index=0, rank=0, address=ADDRESS))
        attempt = Attempt(AttemptPaths(run, "run-1", name), config, _world(tuple(placements), name))
        shared_files.write_document(RunPaths(run).config, config.model_dump(mode="json"))
        shared_files.write_document(attempt.paths.rendezvous / "world.json", attempt.world)
        attempt.redis = stack.enter_context(running_redis(attempt.context("redis")))
        try:
            yield attempt
        finally:
            for child in attempt.children:
                child.stop(STOP_SECONDS)


def _world(placements: tuple[Placement, ...], attempt: str = "7-0") -> World:
    return World(run_id="run-1", attempt=attempt, epoch=1, leader=0, secret=_SECRET, placements=placements)


PASSWORD = _world(()).password
"""That the servers of these attempts prove to know."""
