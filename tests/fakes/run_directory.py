"""Run directories without a run: written by the real writers, with invented numbers and an invented clock."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from pipeline.config import RunConfig
from pipeline.roles.role_context import RoleState, Status
from pipeline.run.events import Event, EventName
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import MetricSinks, roll_back
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, Outcome, RunIdentity, SubmittedJob
from pipeline.topology.assignment import assign
from pipeline.topology.plan import NodeInfo, World, make_plan
from pipeline.utils import shared_files
from slurm.registry import file_locks
from tests.fakes.configs import make_config

BEGAN = 1_767_225_600.0
Decision = Literal["finished", "requeued", "left", "stopped"]


@dataclass
class FakeRun:
    """One run below `root`; `now` is its clock, in seconds since the epoch."""

    root: Path
    config: RunConfig = field(default_factory=make_config)
    now: float = BEGAN

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.root)
        self.identity = RunIdentity(run_id=f"{self.root.name}-0123abcd", created=self.now, revision="0123456789ab")
        shared_files.write_document(self.paths.run, self.identity)
        shared_files.write_document(self.paths.config, self.config.model_dump(mode="json"))

    def attempt(self, name: str) -> "FakeAttempt":
        return FakeAttempt(self, self.paths.attempt(self.identity.run_id, name))

    @contextmanager
    def launched(self) -> Iterator["FakeRun"]:
        """A launcher on this machine has the run."""
        with self.paths.lock.open("a+") as lock:
            assert file_locks.take_lock(lock.fileno(), self.paths.lock)
            yield self

    def submit(self, job: str, kind: Literal["local", "slurm"] = "slurm") -> None:
        """The run is this job from now on."""
        record = SubmittedJob(kind=kind, job=job, user="alice", host="login", time=self.now)
        shared_files.write_document(self.paths.job, record)

    def finish(self, steps: int) -> None:
        shared_files.write_document(self.paths.finished, Finished(time=self.now, steps=steps, attempt="last"))


class FakeAttempt:
    """One attempt; every call writes what the agents or the roles would have written."""

    def __init__(self, run: FakeRun, paths: AttemptPaths) -> None:
        self.run, self.paths = run, paths
        paths.root.mkdir(parents=True)
        self.world: World | None = None
        self._failed: set[str] = set()

    def meet(self) -> World:
        """The ranks publish the world."""
        plan = make_plan(self.run.config)
        node_infos = [_node_info(rank, self.paths.attempt, plan.ports_per_rank) for rank in range(plan.ranks)]
        name, run_id = self.paths.attempt, self.paths.run_id
        self.world = assign(plan, node_infos, run_id=run_id, attempt=name, epoch=1, leader=0, secret="secret")
        shared_files.write_document(self.paths.world, self.world)
        return self.world

    def all_roles(self, *states: RoleState, seconds: float = 0.5) -> None:
        """Every role that has not failed passes through the states, one role after the other."""
        assert self.world
        for state in states:
            for placement in self.world.placements:
                if placement.name in self._failed:
                    continue
                self.run.now += seconds
                self.role(placement.name, placement.rank, state)

    def role(self, name: str, rank: int, state: RoleState, detail: str = "") -> None:
        """A role changes its state: its agent adds a line to the timeline, and it reports."""
        line = {"time": self.run.now, "role": name, "rank": rank, "state": state, "detail": detail}
        self.paths.timeline.mkdir(parents=True, exist_ok=True)
        with (self.paths.timeline_of(rank)).open("ab") as timeline:
            timeline.write(msgspec.json.encode(line) + b"\n")
        if state in ("starting", "ready"):
            shared_files.write_document(
                self.paths.status(name), Status(state=state, pid=1, time=self.run.now, detail=detail)
            )

    def train(
        self, job: str, steps: Iterable[int], seconds: float = 0.4, eval_every: int = 0, **numbers: float
    ) -> None:
        """The trainer goes on from the commit before these steps and logs them, an evaluation every `eval_every`; with
        these `numbers` in each."""
        steps = list(steps)
        roll_back(self.run.paths.metrics, job, min(steps, default=1) - 1)
        with MetricSinks(self.run.paths.metrics, self.paths.attempt, clock=lambda: self.run.now) as sinks:
            for step in steps:
                self.run.now += seconds
                if eval_every and step % eval_every == 0:
                    sinks.log("eval", job, step, {"eval/accuracy": _skill(step)})
                if step > 0:
                    sinks.log("train", job, step, _numbers(job, step) | numbers)

    def tell(self, name: EventName, by: str, detail: str = "") -> None:
        slot = 1 + len(list(self.paths.events.glob("[!.]*.json")))
        event = Event(name=name, by=by, time=self.run.now, detail=detail)
        shared_files.write_document(self.paths.events / f"{slot}.json", event)

    def live(self, ranks: int, at: float) -> None:
        """The agents of so many ranks show that they live, at a moment of the real clock."""
        self.paths.alive.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            (self.paths.alive / str(rank)).touch()
            os.utime(self.paths.alive / str(rank), (at, at))

    def leave(self, rank: int) -> None:
        """A rank's agent says that it is down."""
        shared_files.write_document(self.paths.down(f"agent.{rank}"), "left")

    def conclude(self, decision: Decision, reason: str) -> None:
        """The batch script decides what becomes of the job."""
        shared_files.write_document(self.paths.outcome, Outcome(decision=decision, reason=reason, time=self.run.now))

    def fail(self, role: str, rank: int) -> FirstFailure:
        """A role is killed and its agent records it."""
        failure = FirstFailure(
            role=role,
            rank=rank,
            cause="killed by SIGKILL",
            exit_code=-9,
            time=self.run.now,
            log=str(self.paths.logs / f"{role}.log"),
            last_lines=("12:00:01 INFO group 811 sent", "12:00:02 INFO group 812 sent"),
        )
        shared_files.write_document(self.paths.first_failure, failure)
        self._failed.add(role)
        self.role(role, rank, "failed", failure.cause)
        self.tell("failed", role, failure.one_line())
        return failure


def _node_info(rank: int, attempt: str, ports: int) -> NodeInfo:
    return NodeInfo(
        rank=rank,
        attempt=attempt,
        hostname=f"node{rank}",
        pid=100 + rank,
        boot="boot",
        addresses=(f"127.0.0.{rank + 2}",),
        probe_port=9000,
        ports=tuple(range(10_000, 10_000 + ports)),
    )


def _skill(step: int) -> float:
    return 0.2 + 0.6 * (1 - math.exp(-step / 60))


def _numbers(job: str, step: int) -> dict[str, float]:
    """Numbers of a step that wobble without chance."""
    wobble = math.sin(step * 1.7) * math.cos(step * 0.9)
    if job == "sft":
        return {"loss": 2.5 * math.exp(-step / 60) + 0.2 + 0.05 * wobble, "lr": 1e-3}
    return {
        "loss": 0.02 * wobble,
        "reward/mean": _skill(step) + 0.06 * wobble,
        "staleness/mean": 0.8 + 0.3 * wobble,
        "staleness/max": 1.0 + (step % 7 == 0),
        "tokens_per_second": 9_000 + 1_500 * wobble,
        "idle/trainer": 0.3 + 0.1 * wobble,
        "idle/servers": 0.18 - 0.06 * wobble,
        "idle/actor": 0.1 + 0.05 * wobble,
        "sync/seconds": 0.03 + 0.01 * wobble,
    }
