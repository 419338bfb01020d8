"""Agents of one attempt, on one simulated time and a disk in memory, with roles that are a few rules.

The roles do as real ones do: they fail when Redis is gone while they need it, and the trainer hears of an end through
the disk of its own node, commits, and ends on all its nodes at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RollcallError
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.run.events import EventPoller, Events
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.topology.plan import Placement, RoleName, World
from pipeline.utils import subprocesses
from pipeline.utils.waiting import Clock
from slurm.agent import agent, supervisor
from slurm.agent.agent_heartbeat import mark_down
from slurm.agent.role_lifecycle import End
from slurm.agent.supervisor import StopRequest, Supervisor
from tests.fakes.configs import make_config
from tests.fakes.disk import Disk, Faults, View
from tests.fakes.lockstep import Lockstep
from tests.fakes.run_directory import FakeRun

PLACES: tuple[tuple[RoleName, int, int], ...] = (
    ("redis", 0, 0),
    ("preprocessor", 0, 0),
    ("trainer", 0, 1),
    ("trainer", 1, 2),
    ("inference", 0, 3),
    ("actor", 0, 4),
)
"""Role, index and rank."""
RANKS = 5
READY_AT, COMMIT_SECONDS = 20.0, 5.0
STOP_SECONDS = 0.5


class Well:
    """The vitals of a role that lives, and is ready as soon as it says so."""

    def __init__(self, _name: str, launch: RoleCommand, _seconds: float, _clock: Clock) -> None:
        self._launch = launch
        self.probe, self.board, self.last_error = self, self, ""
        self.environment: dict[str, str] = {}

    @property
    def success_count(self) -> int:
        return int(self._launch.ready())

    def start(self) -> None:
        pass

    def watch(self, _pid: int) -> None:
        pass

    def find_stopped(self, _pid: int) -> None:
        pass

    def worker_pids(self) -> list[int]:
        return []

    def last_signs(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class FakeChild:
    """The process of a role: it ends when it is asked to, or by a rule of its own."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self._cluster, self._name = cluster, name
        self.pid = 0
        self.asked: float | None = None
        """When it was asked to end, if it was."""
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._cluster.rule(self._name)
        if self.code is None and self.asked is not None and self._cluster.time >= self.asked + STOP_SECONDS:
            self.code = 1 if self._name.startswith("trainer") else 0
        return self.code

    def group_is_gone(self) -> bool:
        return self.poll() is not None

    def terminate(self) -> None:
        self.asked = self._cluster.time if self.asked is None else self.asked

    def kill(self, seconds: float = 0.0) -> int:
        self.code = -9 if self.code is None else self.code
        return self.code


@dataclass
class Cluster:
    """Five agents. What happens is set before `run`.

    Attributes:
        lags: rank → seconds after which it sees what another wrote.
        trained: when the last step is done; the trainer then tells so.
        signals: rank → when its agent is told to end.
        outages: rank → from when until when its disk fails.
        dies: a role that is killed, and when.
        ranks: how many they take themselves for.
        leader: who closes the run.
        ready_at: when the trainer's controller reports that it is ready.
    """

    run: FakeRun
    lags: Mapping[int, float]
    trained: float = float("inf")
    signals: Mapping[int, float] = field(default_factory=dict)
    outages: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    dies: tuple[str, float] = ("", float("inf"))
    ranks: int = RANKS
    leader: int = 0
    ready_at: float = READY_AT

    def __post_init__(self) -> None:
        self.lockstep = Lockstep()
        self.paths: AttemptPaths = self.run.attempt("7-0").paths
        self.clock = _Watch(self.lockstep)
        self.disk = Disk(self.clock, Faults(lags=self.lags, outages=self.outages))
        self.views = [View(self.disk, rank) for rank in range(RANKS)]
        places = tuple(Placement(role=role, index=index, rank=rank, address="10.0.0.1") for role, index, rank in PLACES)
        identity = self.run.identity.run_id
        self.world = World(run_id=identity, attempt="7-0", epoch=1, leader=self.leader, secret="s", placements=places)
        self.children: dict[str, FakeChild] = {}
        self.left: set[int] = set()
        self.cut_off: set[int] = set()
        """Those whom srun would have ended, since another agent had failed."""
        self._trainer = EventPoller(Events(self.paths, self.views[1]), self.ranks, self.clock)
        self._commits_since: float | None = None
        self.committed = False

    @property
    def time(self) -> float:
        return self.lockstep.time

    def start(self, monkeypatch: pytest.MonkeyPatch) -> list[End | Exception]:
        """Run all agents to their ends: what each returned, or the failure that it raised."""
        monkeypatch.setattr(supervisor, "role_command", self._launch)
        monkeypatch.setattr(supervisor, "LivenessMonitor", Well)
        monkeypatch.setattr(subprocesses, "Child", lambda argv, log, env, forks: self._begin(argv[0]))
        return self.lockstep.run([partial(self._agent, rank) for rank in range(RANKS)])

    def _launch(self, context: RoleContext) -> RoleCommand:
        """The trainer is ready when its controller has reported so, which its other nodes see as late as anything."""
        place = context.placement
        late = self.lags.get(place.rank, 0.0) if place.index else 0.0
        ready_at = self.ready_at + late if place.role == "trainer" else 0.0
        told_elsewhere = place.role == "trainer" and place.index > 0
        return RoleCommand(argv=(place.name,), ready=lambda: self.time >= ready_at, reports_state=told_elsewhere)

    def _begin(self, name: str) -> FakeChild:
        self.children[name] = FakeChild(self, name)
        return self.children[name]

    def _agent(self, rank: int, clock: Clock) -> End:
        """What `slurm.agent.agent` does of an attempt once there is a world."""
        view, run, config = self.views[rank], RunPaths(self.run.root), self.run.config
        contexts = [RoleContext(self.paths, config, self.world, place) for place in self.world.of_rank(rank)]
        notice = _Signal(self, self.signals.get(rank, float("inf")))
        supervised = Supervisor(
            contexts, f"agent.{rank}", self.paths, config.cluster, notice, clock, ranks=self.ranks, attempt=view
        )
        end = supervised.run()
        if end == "finished" and rank == self.world.leader:
            agent._finish(run, self.paths, config, self.world, view, clock)
        mark_down(view, rank, clock)
        self.left.add(rank)
        if end == "failed":
            agent._wait_for_other_agents(run, view, RANKS, clock)
            self.cut_off |= set(range(RANKS)) - self.left
            raise RollcallError(f"agent {rank} saw the others off")
        return end

    def rule(self, name: str) -> int | None:
        """How the process of a role ends by itself, if it does now."""
        victim, when = self.dies
        if name == victim and self.time >= when:
            return -9
        if name.startswith("trainer"):
            return self._train()
        if name.startswith(("actor", "preprocessor")) and self._is_gone("redis.0"):
            return 1
        return None

    def _train(self) -> int | None:
        if self.committed:
            return 0
        if self._is_gone("redis.0") or any(self._is_gone(f"trainer.{index}") for index in (0, 1)):
            return 1
        if self.time >= self.trained:
            self._end_of_training()
        elif self._commits_since is not None:
            self.committed = self.time >= self._commits_since + COMMIT_SECONDS
        elif self._trainer.poll():
            self._commits_since = self.time
        return 0 if self.committed else None

    def _end_of_training(self) -> None:
        self.committed = True
        Events(self.paths, self.views[1]).publish("training_finished", "trainer.0")

    def _is_gone(self, name: str) -> bool:
        return name in self.children and self.children[name].code is not None


class _Watch(Clock):
    """Shows the time; nobody sleeps by it."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep

    def now(self) -> float:
        return self._lockstep.time


class _Signal(StopRequest):
    """A notice that is left at a certain time."""

    def __init__(self, cluster: Cluster, when: float) -> None:
        self._cluster, self._when = cluster, when

    @property
    def reason(self) -> str:  # type: ignore[override]
        return "SIGTERM" if self._cluster.time >= self._when else ""


def make_cluster(root: Path, lags: Mapping[int, float], **story: Any) -> Cluster:
    """A cluster on Slurm, whose filesystem is that of many machines."""
    config = make_config(cluster={"scheduler": "slurm"}, model={"path": "tiny_qwen3", "init": "random"})
    return Cluster(FakeRun(root / "run", config), lags, **story)
