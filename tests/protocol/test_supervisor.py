"""Supervisors of several ranks with real processes: who ends, in which order, and what is said of it."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipeline.config.places import ClusterConfig
from pipeline.roles import Launch
from pipeline.roles.context import RoleContext
from pipeline.rundir.events import Events
from pipeline.rundir.failure import FirstFailure
from pipeline.rundir.paths import AttemptPaths
from pipeline.system import files
from pipeline.system.process import Child
from pipeline.system.waiting import Deadline, wait_for
from pipeline.world.plan import Placement, RoleName, World
from slurm.launch.compose import compose_config
from slurm.node import supervisor
from slurm.node.supervisor import End, Notice, Supervisor
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

FOREVER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{FOREVER}"
BEATS = """
import threading, time
from pipeline.system import heartbeat
heartbeat.start()
print('up', flush=True)
def work():
    while True:
        heartbeat.beat()
        time.sleep(0.05)
"""
STUCK = """
def get_stuck():
    time.sleep(600)
"""
UNTIL_TOLD = (
    "import sys, time, pathlib; print('up', flush=True)\n"
    "while not list(pathlib.Path(sys.argv[1]).glob('*.json')): time.sleep(0.02)"
)
RANKS: dict[RoleName, int] = {"redis": 0, "preprocessor": 0, "actor": 0, "trainer": 1, "inference": 2}


@dataclass
class Attempt:
    """An attempt of three ranks whose roles are small scripts."""

    paths: AttemptPaths
    cluster: ClusterConfig
    scripts: dict[RoleName, str]
    gpus: dict[RoleName, tuple[int, ...]] = field(default_factory=dict)
    restarts: int = 0
    ends: dict[int, End] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    supervisors: dict[int, Supervisor] = field(default_factory=dict)
    notices: dict[int, Notice] = field(default_factory=dict)
    spoken: threading.Event = field(default_factory=threading.Event)
    """Until it is set, whoever asks whether a mute role is ready gets no answer."""
    others: set[psutil.Process] = field(default_factory=lambda: set(psutil.Process().children(recursive=True)))

    @property
    def events(self) -> Events:
        return Events(self.paths)

    def launch(self, context: RoleContext) -> Launch:
        role = context.placement.role
        argv = (sys.executable, "-c", self.scripts[role], str(self.paths.events))
        return Launch(argv=argv, ready=lambda: self.is_ready(role), beats=self.scripts[role].count("heartbeat.start"))

    def is_ready(self, role: RoleName) -> bool:
        """Whether it printed `up`; what a script has in its comments goes wrong."""
        if "# mute" in self.scripts[role]:
            self.spoken.wait(60)
        if "# no log" in self.scripts[role]:
            raise FileNotFoundError("no log")
        return b"up" in self.paths.log(role, 0).read_bytes()

    def start(self) -> None:
        config = compose_config(["experiment=demo", f"inference.restarts={self.restarts}"])
        places = tuple(
            Placement(role=role, index=0, rank=rank, address="127.0.0.2", gpus=self.gpus.get(role, ()))
            for role, rank in RANKS.items()
        )
        world = World(run_id="r", attempt="a-0", epoch=1, leader=0, secret="s", placements=places)
        for rank in sorted(set(RANKS.values())):
            contexts = [RoleContext(self.paths, config, world, place) for place in world.of_rank(rank)]
            self.notices[rank] = Notice()
            self.supervisors[rank] = Supervisor(contexts, f"agent.{rank}", self.paths, self.cluster, self.notices[rank])
            thread = threading.Thread(target=self._run, args=(rank,))
            thread.start()
            self.threads.append(thread)

    def _run(self, rank: int) -> None:
        self.ends[rank] = self.supervisors[rank].run()

    def join(self, seconds: float = 30) -> set[End]:
        for thread in self.threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a supervisor did not end"
        return set(self.ends.values())

    def history(self) -> list[tuple[str, str]]:
        lines = [line for file in self.paths.timeline.glob("*.jsonl") for line in file.read_text().splitlines()]
        entries = sorted((json.loads(line) for line in lines), key=lambda entry: entry["time"])
        return [(entry["role"], entry["state"]) for entry in entries]

    def has_been(self, role: str, states: list[str]) -> bool:
        """Whether these, in this order, are all states of the role so far."""
        return [state for name, state in self.history() if name == role] == states

    def all_ready(self) -> bool:
        return self.ready() == {f"{role}.0" for role in RANKS}

    def ready(self) -> set[str]:
        return {role for role, state in self.history() if state == "ready"}

    def left(self) -> set[psutil.Process]:
        """What was started since this attempt began and is still there."""
        return set(psutil.Process().children(recursive=True)) - self.others

    def pid_of(self, role: RoleName) -> int:
        children = psutil.Process().children(recursive=True)
        return next(child.pid for child in children if self.scripts[role] in child.cmdline())


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Attempt]:
    def make(
        startup_seconds: float = 20,
        silence_seconds: float = 60,
        gpus: dict[RoleName, tuple[int, ...]] | None = None,
        restarts: int = 0,
        **scripts: str,
    ) -> Attempt:
        cluster = ClusterConfig(
            kind="local",
            startup_seconds=startup_seconds,
            stop_seconds=1,
            grace_seconds=3,
            silence_seconds=silence_seconds,
        )
        usual = dict.fromkeys(RANKS, FOREVER) | {"trainer": UNTIL_TOLD}
        distinct = {role: f"{(usual | scripts)[role]}\n# {role}" for role in RANKS}
        made = Attempt(AttemptPaths(tmp_path, "r", "a-0"), cluster, distinct, gpus or {}, restarts)
        monkeypatch.setattr(supervisor, "launch_of", made.launch)
        made.start()
        return made

    return make


def test_a_finished_run_comes_down_in_order_and_redis_last(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=UNTIL_TOLD)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}
    stopped = [role for role, state in run.history() if state == "stopped"]
    assert set(stopped[:3]) == {"actor.0", "preprocessor.0", "trainer.0"}
    assert stopped[3:] == ["inference.0", "redis.0"]


def test_a_role_without_gpus_sees_none(attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    tells = f"import os; print('GPUs', repr(os.environ['CUDA_VISIBLE_DEVICES']))\n{FOREVER}"
    run = attempt(gpus={"inference": (0, 1)}, inference=tells, actor=tells)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}
    assert run.paths.log("actor", 0).read_text().startswith("GPUs ''\n")
    assert run.paths.log("inference", 0).read_text().startswith("GPUs '0,1'\n")


def test_a_role_that_is_killed_fails_every_rank_and_is_named(attempt: Callable[..., Attempt]) -> None:
    run = attempt()
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.role, failure.rank, failure.cause) == ("inference.0", 2, "killed by SIGKILL")
    assert failure.last_lines == ("up",)
    assert ("redis.0", "stopped") in run.history()


def test_a_server_that_was_ready_is_started_again_as_often_as_agreed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(restarts=2)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    for states in (["starting", "ready"] * 2, ["starting", "ready"] * 3):
        killed = run.pid_of("inference")
        os.kill(killed, 9)
        wait_for("a new server", partial(run.has_been, "inference.0", states), WAIT_SECONDS)
        assert run.pid_of("inference") != killed
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.role, failure.cause) == ("inference.0", "killed by SIGKILL")
    assert run.has_been("inference.0", ["starting", "ready"] * 3 + ["failed"])
    assert run.paths.log("inference", 0).read_text() == "up\n" * 3
    assert run.left() == set()


def test_a_server_that_never_was_ready_and_other_roles_are_not_started_again(attempt: Callable[..., Attempt]) -> None:
    run = attempt(restarts=2, inference="import time; time.sleep(600)", startup_seconds=1.5)
    assert run.join() == {"failed"}
    assert run.has_been("inference.0", ["starting", "failed"])


def test_a_server_that_hangs_is_started_again_and_one_that_does_not_come_back_ends_the_attempt(
    attempt: Callable[..., Attempt],
) -> None:
    once = (
        "import pathlib, sys\nat = pathlib.Path(sys.argv[1]).parent / 'once'\nif at.exists(): sys.exit(3)\nat.touch()"
    )
    run = attempt(restarts=2, silence_seconds=2, inference=f"{once}\n{BEATS}\nwork()")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("inference"), signal.SIGSTOP)
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert failure.cause == "exited with code 3"
    assert [state for name, state in run.history() if name == "inference.0"].count("starting") == 3


def test_a_role_that_ends_well_but_too_early_has_failed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(inference="print('up', flush=True)")
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.role, failure.cause) == ("inference.0", "exited with code 0")


def test_a_role_that_never_becomes_ready_fails_by_its_deadline(attempt: Callable[..., Attempt]) -> None:
    run = attempt(startup_seconds=1.5, actor="import time; time.sleep(600)")
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert failure.cause == "waited 1.5 s for actor.0 to become ready"


def test_a_role_that_gives_no_answer_keeps_nobody_from_hearing_the_end(attempt: Callable[..., Attempt]) -> None:
    run = attempt(actor=f"{FOREVER}  # mute", startup_seconds=60)
    try:
        wait_for("the other roles", lambda: run.ready() == {f"{role}.0" for role in RANKS} - {"actor.0"}, WAIT_SECONDS)
        run.notices[0].reason = "SIGTERM"
        assert run.join() == {"preempted"}
    finally:
        run.spoken.set()
    assert ("actor.0", "ready") not in run.history()


def test_a_question_that_raises_is_told_when_the_time_is_up(attempt: Callable[..., Attempt]) -> None:
    run = attempt(startup_seconds=1.5, actor=f"{FOREVER}  # no log")
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert failure.cause.endswith("to become ready; missing: FileNotFoundError: no log")


def test_a_role_that_is_stopped_is_found_ended_and_named_with_its_stacks(attempt: Callable[..., Attempt]) -> None:
    run = attempt(silence_seconds=2, actor=f"{BEATS}\nwork()")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("actor"), signal.SIGSTOP)
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.role, failure.rank, failure.last_lines) == ("actor.0", 0, ("up",))
    assert "has shown no sign of life" in failure.cause
    assert failure.cause.endswith("it is stopped (SIGSTOP)")
    assert any(" in work" in line for line in failure.stacks)
    assert " in work" in run.paths.log("actor", 0).read_text()
    assert "cluster.silence_seconds" in failure.mend
    assert run.left() == set()


def test_a_role_whose_work_is_stuck_is_found_although_its_process_runs(attempt: Callable[..., Attempt]) -> None:
    run = attempt(silence_seconds=2, trainer=f"{BEATS}{STUCK}\nwith heartbeat.during('stepping', 1):\n    get_stuck()")
    assert run.join() == {"failed"}
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert failure.role == "trainer.0"
    assert "makes no progress in 'stepping'" in failure.cause
    assert any(" in get_stuck" in line for line in failure.stacks)


def test_a_silence_while_the_attempt_ends_is_no_failure(attempt: Callable[..., Attempt]) -> None:
    until_told = UNTIL_TOLD.replace("time.sleep", "heartbeat.beat() or time.sleep")
    run = attempt(silence_seconds=2, trainer=f"{BEATS}\n{until_told}\ntime.sleep(2.6)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[0].reason = "SIGTERM"
    assert run.join() == {"preempted"}
    assert not run.paths.first_failure.exists()


def test_draining_waits_for_the_trainer_to_commit_and_end(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=f"{UNTIL_TOLD}\ntime.sleep(1.5)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[2].reason = "SIGTERM"
    assert run.join() == {"preempted"}
    history = run.history()
    assert ("trainer.0", "stopping") not in history
    assert history.index(("trainer.0", "stopped")) < history.index(("inference.0", "stopping"))


def test_a_trainer_that_does_not_end_within_the_grace_is_ended(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[0].reason = "SIGTERM"
    assert run.join() == {"preempted"}
    assert ("trainer.0", "stopping") in run.history()
    assert run.left() == set()


def test_a_trainer_has_as_much_time_to_commit_when_something_else_failed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=f"{UNTIL_TOLD}\ntime.sleep(1.5)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("actor"), 9)
    assert run.join() == {"failed"}
    history = run.history()
    assert ("trainer.0", "stopping") not in history
    assert history.index(("inference.0", "stopping")) < history.index(("trainer.0", "stopped"))
    assert history.index(("trainer.0", "stopped")) < history.index(("redis.0", "stopping"))


def test_a_role_that_the_kernel_does_not_end_keeps_no_other_alive(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kill = attempt(redis=STUBBORN, actor=STUBBORN), Child.kill
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    stuck = run.pid_of("redis")

    def cannot(child: Child, seconds: float = 0.0) -> int:
        return -9 if child.pid == stuck else kill(child, seconds)

    monkeypatch.setattr(Child, "kill", cannot)
    run.events.publish("failed", "agent.9", "for the test")
    try:
        assert run.join() == {"failed"}
        assert {process.pid for process in run.left()} == {stuck}
        assert "the kernel keeps it" in next(run.paths.timeline.glob("rank-0.jsonl")).read_text()
    finally:
        monkeypatch.undo()
        next(role for role in run.supervisors[0]._roles if role.name == "redis.0").kill()


def test_stubborn_roles_are_ended_with_their_groups(attempt: Callable[..., Attempt]) -> None:
    run = attempt(actor=STUBBORN, redis=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("failed", "agent.9", "for the test")
    assert run.join() == {"failed"}
    assert not run.paths.first_failure.exists()
    assert run.left() == set()


def test_stubborn_roles_do_not_keep_a_finished_run_beyond_its_bound(attempt: Callable[..., Attempt]) -> None:
    run = attempt(actor=STUBBORN, preprocessor=STUBBORN, inference=STUBBORN, redis=STUBBORN, trainer=UNTIL_TOLD)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    deadline = Deadline("the descent", 2 * run.cluster.stop_seconds + 1)
    assert run.join() == {"finished"}
    assert not deadline.passed
    assert run.left() == set()


def test_nobody_waits_for_roles_whose_agent_has_left(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    files.write_document(run.paths.down("agent.1"), "left")
    run.notices[2].reason = "SIGTERM"
    wait_for("Redis to be down", lambda: ("redis.0", "stopped") in run.history(), run.cluster.grace_seconds - 0.5)
    assert run.join() == {"preempted"}


def test_a_trainer_that_fails_to_commit_while_draining_is_a_failure(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=f"{UNTIL_TOLD}\nraise SystemExit(5)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[0].reason = "SIGTERM"
    run.join()
    assert run.ends[RANKS["trainer"]] == "failed"
    failure = files.read_document(run.paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.role, failure.exit_code) == ("trainer.0", 5)
