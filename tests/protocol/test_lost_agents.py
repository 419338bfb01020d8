"""Agents that monitor each other over TCP, as processes: which of them are lost within seconds, and which are not."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from pipeline.run.events import Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import FIRST_FAILURE, AttemptPaths
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import wait_for
from slurm.agent.loss_rule import LOOK_SECONDS, REFUSED_SECONDS, UNREACHABLE_SECONDS
from tests.patience import WAIT_SECONDS
from tests.protocol.monitored_agent import ATTEMPT, RUN, SCALE, address_of

pytestmark = pytest.mark.integration

RANKS = 3
HEARTBEAT_SECONDS = 100.0
"""Less than the heartbeat's timeout, by which the loss would be found in any case."""
TIMEOUTS_SECONDS = 2.0
"""The timeouts of a look at a lost link, and of a question to other ranks."""


class AgentProcess:
    """One agent, and the lines that it has printed."""

    def __init__(self, paths: AttemptPaths, rank: int) -> None:
        command = [sys.executable, "-m", "tests.protocol.monitored_agent", str(paths.run), str(rank), str(RANKS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = list[str]()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += (line.strip() for line in self.process.stdout)

    def has_printed(self, line: str) -> bool:
        return line in self.lines

    def command(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def lose(self, *ranks: int) -> None:
        """Lose all packets from these ranks from now on."""
        for rank in ranks:
            self.command(f"lose {address_of(rank)}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self._thread.join(WAIT_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Agents:
    """Three agents, each of which monitors the next one."""

    def __init__(self, paths: AttemptPaths, stack: ExitStack) -> None:
        self.paths, self.all = paths, list[AgentProcess]()
        for rank in range(RANKS):
            self.all.append(AgentProcess(paths, rank))
            stack.callback(self.all[rank].end)
        for agent in self.all:
            wait_for("the first answers", partial(agent.has_printed, "answers"), WAIT_SECONDS)

    def signal(self, number: int) -> None:
        """Send a signal to rank 1."""
        self.all[1].process.send_signal(number)

    @property
    def failure(self) -> FirstFailure | None:
        return FileSharedDir(self.paths.root).read(FIRST_FAILURE, FirstFailure)

    def await_loss(self) -> FirstFailure:
        """The recorded loss of rank 1, once the others have read of it."""
        for rank in (0, 2):
            wait_for("the event", partial(self.all[rank].has_printed, "failed"), HEARTBEAT_SECONDS)
        failure = self.failure
        assert failure is not None
        assert (failure.role, failure.rank) == ("agent.1", 1)
        return failure


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    paths = AttemptPaths(tmp_path, RUN, ATTEMPT)
    for folder in paths.shared:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield Agents(paths, stack)


def test_a_killed_agent_is_recorded_as_lost_long_before_its_heartbeat_is_missed(agents: Agents) -> None:
    agents.signal(signal.SIGKILL)
    assert agents.await_loss().cause.startswith("its process has ended: its node refuses it, no connection for ")


@pytest.mark.trial
def test_a_stopped_agent_is_not_lost_and_is_once_it_is_killed(agents: Agents) -> None:
    agents.signal(signal.SIGSTOP)
    time.sleep(UNREACHABLE_SECONDS * SCALE + TIMEOUTS_SECONDS)
    assert agents.failure is None
    agents.signal(signal.SIGCONT)
    time.sleep(2 * REFUSED_SECONDS * SCALE)
    assert agents.failure is None
    agents.signal(signal.SIGSTOP)
    agents.signal(signal.SIGKILL)
    assert agents.await_loss().cause.startswith("its process has ended")


def test_a_rank_whose_link_alone_is_cut_is_not_lost(agents: Agents) -> None:
    agents.all[0].lose(1)
    time.sleep(1.5 * UNREACHABLE_SECONDS * SCALE + TIMEOUTS_SECONDS)
    assert agents.failure is None


def test_a_rank_that_left_after_an_event_is_not_lost_for_one_that_cannot_see_the_event_yet(agents: Agents) -> None:
    agents.all[0].command("late")
    time.sleep(LOOK_SECONDS * SCALE)
    Events(agents.paths).publish("training_finished", "trainer.0")
    wait_for("the event", partial(agents.all[1].has_printed, "training_finished"), WAIT_SECONDS)
    agents.all[1].command("")
    assert agents.all[1].process.wait(WAIT_SECONDS) == 0
    time.sleep(2 * REFUSED_SECONDS * SCALE + TIMEOUTS_SECONDS)
    assert not agents.all[0].has_printed("training_finished")
    assert agents.failure is None


def test_a_node_that_vanishes_is_recorded_as_lost(agents: Agents) -> None:
    agents.signal(signal.SIGSTOP)  # it touches no file, as a node without power
    for rank in (0, 2):
        agents.all[rank].lose(1)
    assert agents.await_loss().cause.startswith("its node is unreachable, no connection for ")


@pytest.mark.trial
def test_a_node_without_network_that_reaches_its_disk_is_not_lost(agents: Agents) -> None:
    for rank in (0, 2):
        agents.all[rank].lose(1)
    agents.all[1].lose(0, 2)
    time.sleep(1.5 * UNREACHABLE_SECONDS * SCALE + TIMEOUTS_SECONDS)
    assert agents.failure is None
