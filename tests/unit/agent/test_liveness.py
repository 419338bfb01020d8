"""From when on a silence is a hang, and whose."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pipeline.roles import RoleCommand
from pipeline.utils import heartbeat
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT
from pipeline.utils.heartbeat import Heartbeat, HeartbeatBoard
from pipeline.utils.waiting import wait_for
from slurm.agent.liveness import LivenessMonitor
from tests.fakes.clock import FakeClock

pytestmark = pytest.mark.integration

SECONDS = 60.0
LEADER = 1 << 30
"""No process has this id."""


class Watched:
    """A role of some processes whose records a test writes, under a clock that it moves."""

    def __init__(self, processes: int) -> None:
        self.clock, self.answers, self.leader = FakeClock(), True, LEADER
        self.vitals = LivenessMonitor("role.0", RoleCommand(("none",), lambda: True, processes), SECONDS, self.clock)
        self.records = [Heartbeat(LEADER + slot, 0, 0, 0.0, "") for slot in range(processes)]

    def pass_time(self, seconds: int, tell: Callable[[], None]) -> str:
        """What is said of the role at the end, when something is told every second and looked at twice."""
        said = ""
        for _ in range(2 * seconds):
            tell()
            self.clock.sleep(0.5)
            hang = self.vitals.watch(self.leader)
            said = hang.cause if hang else ""
        return said

    def tick(self, *slots: int) -> None:
        for slot in slots:
            self.records[slot] = replace(self.records[slot], ticks=self.records[slot].ticks + 1)

    def beat(self, slot: int, seconds: float = 0.0, doing: str = "") -> None:
        beats = self.records[slot].beats + 1
        self.records[slot] = replace(self.records[slot], beats=beats, seconds=seconds, doing=doing)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Watched]]:
    made: list[Watched] = []

    def make(processes: int) -> Watched:
        made.append(Watched(processes))
        monkeypatch.setattr(
            HeartbeatBoard, "read", lambda board: next(one.records for one in made if one.vitals.board is board)
        )
        return made[-1]

    yield make
    for one in made:
        one.vitals.close()


def test_a_role_whose_work_goes_on_lives(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    assert role.pass_time(500, lambda: (role.tick(0), role.beat(0))[0]) == ""


def test_a_process_that_does_not_tick_hangs_whatever_it_declared(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    role.beat(0, 1800.0, "waiting for an order")
    assert role.pass_time(60, lambda: None) == ""
    assert "process 0 (pid 1073741824) has shown no sign of life for 60 s, it is gone" in role.pass_time(
        1, lambda: None
    )


def test_a_process_that_never_told_anything_hangs_too(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    role.records = [Heartbeat(0, 0, 0, 0.0, "")]
    assert "its process 0 has shown no sign of life" in role.pass_time(62, lambda: None)


def test_the_last_signs_say_how_old_tick_and_progress_are(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    assert role.vitals.last_signs() == ["not watched yet; 0 successful health checks"]
    role.beat(0, 300.0, "loading policy")
    role.pass_time(20, lambda: role.tick(0))
    (line,) = role.vitals.last_signs()
    assert line.endswith(": last tick 0 s ago, last progress 20 s ago, in 'loading policy'")


def test_work_that_stands_still_hangs_although_its_process_runs(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    assert "makes no progress for 60 s" in role.pass_time(61, lambda: role.tick(0))


def test_what_said_that_it_takes_long_has_that_long_and_then_hangs_by_its_name(
    watched: Callable[[int], Watched],
) -> None:
    role = watched(1)
    role.beat(0, 300.0, "loading policy")
    assert role.pass_time(300, lambda: role.tick(0)) == ""
    assert "makes no progress in 'loading policy' for 300 s" in role.pass_time(1, lambda: role.tick(0))
    role.beat(0)
    assert role.pass_time(60, lambda: role.tick(0)) == ""


def test_who_declares_less_than_everybody_has_is_given_that(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    role.beat(0, 5.0, "a moment")
    assert role.pass_time(60, lambda: role.tick(0)) == ""


def test_the_process_that_stands_still_is_named_and_not_those_that_wait_for_it(
    watched: Callable[[int], Watched],
) -> None:
    role = watched(3)
    assert role.pass_time(30, lambda: role.tick(0, 1, 2)) == ""
    assert "process 1 " in role.pass_time(62, lambda: role.tick(0, 2))


def test_time_in_which_the_agent_did_not_run_is_nobodys_silence(watched: Callable[[int], Watched]) -> None:
    role = watched(1)
    assert role.pass_time(30, lambda: None) == ""
    role.clock.sleep(10_000.0)
    assert role.pass_time(20, lambda: None) == ""


def test_a_program_that_is_asked_lives_as_long_as_it_answers(watched: Callable[[int], Watched]) -> None:
    role = watched(0)
    probe = role.vitals.probe

    def answer() -> None:
        probe.success_count += 1

    assert role.pass_time(200, answer) == ""
    probe.last_error = "OSError: no route"
    assert "it has not answered for 61 s, it is gone; OSError: no route" in role.pass_time(61, lambda: None)


WAITS_IN_THE_KERNEL = """
import ctypes, os, signal, sys, time
CLONE_VFORK = 0x4000
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
parent = os.getpid()
if ctypes.CDLL(None).syscall(number, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    print("waits", flush=True)
    sys.stdin.read()
    os._exit(0)
print("back", flush=True)
time.sleep(600)
"""
"""A process in state D, which is what a write to a frozen disk looks like: the kernel holds it until its child ends."""


@pytest.fixture
def waiting_process() -> Iterator["subprocess.Popen[str]"]:
    argv = [sys.executable, "-c", WAITS_IN_THE_KERNEL]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "waits\n"
        try:
            yield process
        finally:
            process.stdin.close()
            process.kill()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_role_that_waits_for_a_disk_has_the_two_minutes_of_an_outage(
    watched: Callable[[int], Watched], waiting_process: "subprocess.Popen[str]", processes: int
) -> None:
    role = watched(processes)
    role.leader = waiting_process.pid
    told = "makes no progress for 120 s" if processes else "has not answered for 120 s, it waits for a disk"
    assert role.pass_time(int(FS_OUTAGE_TIMEOUT), lambda: role.tick(*range(processes))) == ""
    assert told in role.pass_time(1, lambda: role.tick(*range(processes)))


def test_a_role_whose_disk_is_back_has_time_to_say_so(
    watched: Callable[[int], Watched], waiting_process: "subprocess.Popen[str]"
) -> None:
    role = watched(0)
    role.leader = waiting_process.pid
    assert role.pass_time(90, lambda: None) == ""
    assert waiting_process.stdin is not None
    assert waiting_process.stdout is not None
    waiting_process.stdin.close()
    assert waiting_process.stdout.readline() == "back\n"
    assert role.pass_time(29, lambda: None) == ""
    role.vitals.probe.success_count += 1
    assert role.pass_time(60, lambda: None) == ""
    assert "has not answered for 60 s" in role.pass_time(1, lambda: None)


TELLS = """
import os, sys, time
from pipeline.utils import heartbeat
heartbeat.start(1)
with heartbeat.busy_with("outer", 7):
    with heartbeat.busy_with("inner", 3):
        heartbeat.beat()
    if os.fork() == 0:
        heartbeat.beat()
        os._exit(0)
    os.wait()
    def here():
        sys.stdin.read()
    here()
"""


def test_what_a_process_tells_and_where_it_is_reach_its_agent_and_a_fork_tells_nothing() -> None:
    board = HeartbeatBoard(2)
    command = [sys.executable, "-c", TELLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=board.environment) as child:
        try:
            wait_for("the end of the inner block", lambda: board.read()[1].beats >= 4, 20)
            first = board.read()[1]
            assert (first.pid, first.beats, first.seconds, first.doing) == (child.pid, 4, 7.0, "outer")
            assert board.read()[0].pid == 0
            wait_for("a further tick", lambda: board.read()[1].ticks > first.ticks, 20)
            child.send_signal(heartbeat.STACKS)
            wait_for("its stacks", lambda: "in here" in board.take_stacks(), 20)
            assert child.poll() is None
        finally:
            child.kill()
    board.close()


def test_without_an_agent_nothing_is_told_and_a_lost_one_is_an_error() -> None:
    heartbeat.start(variables={})
    heartbeat.beat()
    with heartbeat.busy_with("anything", 1.0):
        heartbeat.beat()
    with pytest.raises(heartbeat.RollcallError, match="expected my agent's memory"):
        heartbeat.start(variables={heartbeat.VARIABLE: "/proc/0/fd/1 /proc/0/fd/2"})


@pytest.mark.parametrize(("variables", "code"), [({heartbeat.EXITS: "1"}, 7), ({}, 0)])
def test_an_external_program_exits_on_request_in_a_run_with_faults_only(variables: dict[str, str], code: int) -> None:
    board = HeartbeatBoard(0)
    board.request_exit(7)
    program = "from pipeline.utils import heartbeat; heartbeat.exit_if_requested()"
    done = subprocess.run([sys.executable, "-c", program], env=board.environment | variables, timeout=60, check=False)
    board.close()
    assert done.returncode == code
