"""Agents that follow each other over TCP, as processes: who learns of an event, by which way, and what a stranger gets.

The run has 4,096 ranks by its rates: an agent with a link reads the directory once a minute, one without every two
seconds.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from queue import Empty, Queue

import msgspec
import pytest

from pipeline.run.events import Events
from pipeline.run.paths import AttemptPaths
from pipeline.run.poll_rates import linked_poll_interval, poll_interval
from pipeline.topology.plan import NodeInfo
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import wait_for
from slurm.agent.control_link import MAX_FOLLOWERS, LinkQuestion, LinkResponder, PeerLink, PeerRecords
from slurm.agent.control_tree import ChangeBoard, ChangeCounts
from slurm.rendezvous.membership import read_node_info
from slurm.rendezvous.probe_server import PeerConnection, ProbeServer
from tests.fakes.ranks import make_node_infos
from tests.patience import WAIT_SECONDS
from tests.protocol.linked_agent import ATTEMPT, RUN

pytestmark = pytest.mark.integration

RANKS = 4096
HINT_SECONDS = linked_poll_interval(RANKS) / 2
"""Far less than the pause of an agent that would wait for its own next read."""


class AgentProcess:
    """One agent, and the lines that it prints."""

    def __init__(self, paths: AttemptPaths, rank: int) -> None:
        command = [sys.executable, "-m", "tests.protocol.linked_agent", str(paths.run), str(rank), str(RANKS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: Queue[str] = Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def prints(self, line: str, seconds: float) -> bool:
        """Whether the next line comes within `seconds`, and is this one."""
        try:
            return self._lines.get(timeout=seconds) == line
        except Empty:
            return False

    def prints_next(self, line: str, seconds: float) -> bool:
        """As `prints`; a moment without a link before it may be too short to be printed."""
        try:
            first = self._lines.get(timeout=seconds)
        except Empty:
            return False
        return first == line or (first == "follows None" and self.prints(line, seconds))

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self._thread.join(WAIT_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def paths(tmp_path: Path) -> AttemptPaths:
    paths = AttemptPaths(tmp_path, RUN, ATTEMPT)
    for folder in paths.shared:
        folder.mkdir(parents=True, exist_ok=True)
    return paths


@pytest.fixture
def start(paths: AttemptPaths) -> Iterator[Callable[[int], AgentProcess]]:
    with ExitStack() as started:

        def begin(rank: int) -> AgentProcess:
            agent = AgentProcess(paths, rank)
            started.callback(agent.end)
            directory = FileSharedDir(paths.rendezvous)
            wait_for(f"rank {rank}", lambda: read_node_info(directory, rank) is not None, WAIT_SECONDS)
            return agent

        yield begin


def test_an_event_reaches_a_rank_over_two_links_long_before_its_own_next_read(paths, start):
    _, middle, leaf = start(0), start(1), start(17)
    assert middle.prints("follows 0", WAIT_SECONDS)
    assert leaf.prints("follows 1", WAIT_SECONDS)
    Events(paths).publish("draining", "launcher")
    assert leaf.prints("draining", HINT_SECONDS)
    assert middle.prints("draining", HINT_SECONDS)
    Events(paths).publish("failed", "trainer.0")
    assert leaf.prints("failed", HINT_SECONDS)


def test_a_rank_whose_parent_is_killed_follows_the_next_ancestor(paths, start):
    _, middle, leaf = start(0), start(1), start(17)
    assert leaf.prints("follows 1", WAIT_SECONDS)
    middle.process.kill()
    assert leaf.prints_next("follows 0", WAIT_SECONDS)
    Events(paths).publish("failed", "trainer.0")
    assert leaf.prints("failed", HINT_SECONDS)


def test_without_an_ancestor_that_answers_the_files_are_read_and_hints_go_to_those_below(paths, start):
    root, middle, leaf = start(0), start(1), start(17)
    assert middle.prints("follows 0", WAIT_SECONDS)
    assert leaf.prints("follows 1", WAIT_SECONDS)
    root.process.send_signal(signal.SIGSTOP)  # its port still accepts connections
    assert middle.prints("follows None", WAIT_SECONDS)
    Events(paths).publish("failed", "trainer.0")
    assert middle.prints("failed", WAIT_SECONDS + poll_interval(RANKS))
    assert leaf.prints("failed", HINT_SECONDS)


def test_a_link_shows_whether_an_agent_answers_is_stopped_or_has_ended(paths, start):
    other = start(3)
    records = PeerRecords(FileSharedDir(paths.rendezvous), RUN, ATTEMPT)
    with closing(PeerLink(records, 3)) as link:
        wait_for("an answer", lambda: link.look() == "answers", WAIT_SECONDS)
        other.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.process.pid, os.WSTOPPED | os.WNOWAIT)  # each of its threads has stopped
        assert link.look() == "accepts"
        other.process.send_signal(signal.SIGCONT)
        wait_for("another answer", lambda: link.look() == "answers", WAIT_SECONDS)
        other.process.kill()
        other.process.wait(WAIT_SECONDS)
        assert link.look() == "refuses"
    assert PeerLink(records, 4).look() == "unknown", "it has no node record"


def test_a_rank_is_reached_through_others_that_run(paths, start):
    first, _, _ = start(0), start(1), start(17)
    records = PeerRecords(FileSharedDir(paths.rendezvous), RUN, ATTEMPT)
    assert records.is_reached(0, [1, 17])
    assert not records.is_reached(0, [2]), "it has no node record"
    first.process.kill()
    first.process.wait(WAIT_SECONDS)
    assert not records.is_reached(0, [1, 17])


def node_of(server: ProbeServer, token: str) -> NodeInfo:
    record = make_node_infos(1, attempt=ATTEMPT)[0]
    return msgspec.structs.replace(record, addresses=("127.0.0.1",), probe_port=server.port, token=token)


def question(seen: ChangeCounts | None) -> str:
    return msgspec.json.encode(LinkQuestion(seen)).decode()


def test_who_does_not_know_the_token_gets_no_answer_and_no_impostor_is_believed():
    responder = LinkResponder(ChangeBoard(0, 2), lambda: True)
    with ProbeServer(RUN, ATTEMPT, 0, "127.0.0.1", "secret", responder.answer) as server:
        with PeerConnection(RUN, node_of(server, "secret")) as peer:
            for _ in range(2):  # a connection has many questions
                assert msgspec.json.decode(peer.ask(question(None), WAIT_SECONDS), type=ChangeCounts) == ChangeCounts()
        with PeerConnection(RUN, node_of(server, "guess")) as peer, pytest.raises(OSError, match=r"no answer|reset"):
            peer.ask(question(None), WAIT_SECONDS)


def test_an_answer_to_another_question_or_with_other_counts_is_refused():
    answers = ['{"events":0}', '{"events":9}']
    with (
        ProbeServer(RUN, ATTEMPT, 0, "127.0.0.1", "secret", lambda _: answers[0]) as server,
        socket.create_server(("127.0.0.1", 0)) as between,
        PeerConnection(RUN, msgspec.structs.replace(node_of(server, "secret"), probe_port=port_of(between))) as peer,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as real,
        between.accept()[0] as caller,
    ):

        def relay() -> None:
            real.sendall(caller.recv(4096))
            caller.sendall(real.recv(4096).replace(answers[0].encode(), answers[1].encode()))

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(ConnectionError, match="no answer"):
            peer.ask("?", WAIT_SECONDS)
        thread.join(WAIT_SECONDS)


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port


def test_an_agent_whose_disk_is_away_or_that_reads_nothing_does_not_vouch(monkeypatch):
    monkeypatch.setattr("slurm.agent.control_tree.STALE_SECONDS", 0.0)
    responder = LinkResponder(ChangeBoard(0, 2), lambda: False)
    assert responder.answer(question(None)) is None
    assert responder.answer(question(ChangeCounts(events=-1))) is None
    assert responder.answer("{") is None


def test_more_followers_than_an_agent_has_room_for_are_refused_at_once():
    board = ChangeBoard(0, RANKS)
    responder = LinkResponder(board, lambda: True)
    held = [threading.Thread(target=responder.answer, args=(question(ChangeCounts()),)) for _ in range(MAX_FOLLOWERS)]
    for thread in held:
        thread.start()
    wait_for("all followers", lambda: responder.answer(question(ChangeCounts(events=-1))) is None, WAIT_SECONDS)
    board.note_read("events", 1)
    for thread in held:
        thread.join(WAIT_SECONDS)
    assert responder.answer(question(ChangeCounts())) == '{"events":1,"revisions":0}'
