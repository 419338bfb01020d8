"""A node that is cut off from the network: packets between real processes of two virtual nodes are lost, then pass."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from pipeline.run.fault_conditions import begin_condition
from pipeline.run.fault_plan import parse_faults
from pipeline.run.paths import AttemptPaths
from pipeline.utils.waiting import wait_for
from slurm.agent.node_partition import NodePartition
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

NODES = {"127.0.0.2": 0, "127.0.0.3": 1}
ECHO = """
import socket, sys, threading
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
def answer(end):
    while text := end.recv(100):
        end.sendall(text)
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""
CLIENT = """
import socket, sys
from pathlib import Path
from pipeline.run.fault_conditions import lose_connects
from pipeline.run.fault_plan import parse_faults
from pipeline.run.paths import AttemptPaths
nodes = {'127.0.0.2': 0, '127.0.0.3': 1}
lose_connects(AttemptPaths(Path(sys.argv[1]), 'r', 'a-0'), parse_faults([sys.argv[2]]), 0, nodes)
ends = {}
for line in sys.stdin:
    address, port = line.split()
    end = ends[line] if line in ends else socket.create_connection((address, int(port)))
    ends[line] = end
    end.sendall(b'x')
    print(end.recv(1).decode(), flush=True)
"""


class Process:
    """A process of a node, which answers each line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answers: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.answers += (line.strip() for line in iter(self.process.stdout.readline, ""))

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def has_answered(self, count: int) -> bool:
        return len(self.answers) >= count

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def begin(*arguments: str) -> Process:
            process = Process(*arguments)
            stack.callback(process.end)
            return process

        yield begin


def test_a_cut_off_node_exchanges_no_packet_with_others_until_the_partition_ends(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    (fault,) = parse_faults(["partition:node[1]@5s"])
    paths = AttemptPaths(tmp_path, "r", "a-0")
    paths.root.mkdir(parents=True)
    echoes = {address: start(ECHO, address) for address in NODES}
    talker, newcomer, inner = (start(CLIENT, str(tmp_path), fault.text) for _ in range(3))
    for echo in echoes.values():
        wait_for("the port", partial(echo.has_answered, 1), WAIT_SECONDS)
    here, there = (f"{address} {echo.answers[0]}" for address, echo in echoes.items())
    talker.ask(there)
    inner.ask(here)
    for client in (talker, inner):
        wait_for("the first answer", partial(client.has_answered, 1), WAIT_SECONDS)
    ranks = (
        {process.process.pid for process in (talker, newcomer, inner, echoes["127.0.0.2"])},
        {echoes["127.0.0.3"].process.pid},
    )
    with ExitStack() as stack:
        agents = [
            stack.enter_context(NodePartition(paths, [fault], rank, NODES, lambda processes=processes: processes))
            for rank, processes in enumerate(ranks)
        ]
        begin_condition(paths, fault)
        wait_for("both ends to be cut", lambda: [agent.cut_ends for agent in agents] == [1, 2], WAIT_SECONDS)
        talker.ask(there)
        newcomer.ask(there)
        inner.ask(here)
        wait_for("an answer within the node", partial(inner.has_answered, 2), WAIT_SECONDS)
        time.sleep(1.0)
        assert (len(talker.answers), len(newcomer.answers)) == (1, 0)
        (paths.conditions / fault.mark).unlink()
        for client, count in ((talker, 2), (newcomer, 1)):
            wait_for("an answer after the partition", partial(client.has_answered, count), WAIT_SECONDS)
    assert talker.answers + newcomer.answers + inner.answers == ["x"] * 5
