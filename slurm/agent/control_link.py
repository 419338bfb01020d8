"""The links of one agent: its questions to an ancestor and to the rank that it monitors, and its answers to others.

Owns the two questions that agents ask each other through `slurm.rendezvous.probe_server`, the thread that follows an
ancestor, and the connection to the monitored rank. Promises that every question has a deadline, that a link which
misses it is closed and another ancestor asked, that no answer makes an agent do more than read a file, or read one
later, and that the monitor of an agent which leaves has got the number of events that this agent has read. Must not
know what is read, nor what a link's sign means (`loss_rule`).

    links = ControlLinks(paths, rank, ranks, heartbeat.vouch)
    with ProbeServer(…, responder=links.answer):
        …                                         # rendezvous
        with links:                               # follows an ancestor
            schedule = links.schedule("events")   # when to read the events
            links.look(rank)                      # what the link to the agent of another rank shows now
"""

import errno
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

import msgspec

from pipeline.errors import DeadlineError
from pipeline.run.paths import AttemptPaths
from pipeline.topology.plan import NodeInfo
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import CLOCK, wait_for
from slurm.agent.control_tree import ChangeBoard, ChangeCounts, ChangeKind, LinkedSchedule, ancestors
from slurm.agent.loss_rule import LOOK_SECONDS, LinkSign
from slurm.rendezvous.membership import read_node_info
from slurm.rendezvous.probe_server import ANSWER_SECONDS, CALLERS, PeerConnection, find_addresses

HOLD_SECONDS = 5.0
"""Seconds for which an answer is held while nothing changes."""
LATE_ANSWER_SECONDS = 5.0
"""Seconds by which an answer may come later before the link counts as lost."""
RETRY_SECONDS = 5.0
"""Pause of an agent to which no ancestor answers."""
MAX_FOLLOWERS = CALLERS // 2
"""Most followers of one agent; the other connections of its probe server are for questions that end at once."""

MAX_WITNESSES = 3
"""Most other ranks that are asked whether they reach a rank."""

FAREWELL_SECONDS = 2 * LOOK_SECONDS
"""Longest pause between two questions of a monitor that runs, and most seconds that an agent stays for the next one."""
_FAREWELL_PAUSE = 0.05
_UNREACHABLE = (errno.EHOSTUNREACH, errno.EHOSTDOWN)


class LinkQuestion(msgspec.Struct, frozen=True):
    """A follower's question: are there more documents than it has `seen`? None: does the agent run?"""

    seen: ChangeCounts | None = None


class LinkResponder:
    """The answers of one agent to others."""

    def __init__(self, board: ChangeBoard, vouch: Callable[[], bool]) -> None:
        """`vouch` is whether this agent has touched its heartbeat file lately: an agent whose disk is away must not
        count as alive, since its roles cannot go on. It is called for each question of the agent's monitor."""
        self._board, self._vouch = board, vouch
        self._followers = threading.BoundedSemaphore(MAX_FOLLOWERS)
        self._monitor_asked, self._monitor_events = float("-inf"), 0

    def answer(self, question: str) -> str | None:
        """The answer to a question, after at most `HOLD_SECONDS`; None if this agent cannot vouch for it."""
        try:
            seen = msgspec.json.decode(question, type=LinkQuestion).seen
        except msgspec.DecodeError:
            return None
        if seen is None:
            return self._vouched()
        if not self._followers.acquire(blocking=False):
            return None  # the follower asks another ancestor
        try:
            counts = self._board.wait_for_more(seen, HOLD_SECONDS)
        finally:
            self._followers.release()
        return None if counts is None else msgspec.json.encode(counts).decode()

    def take_leave(self) -> None:
        """Wait until the monitor of this rank has got the number of events, if one asks. It may not see the events yet,
        and would take an agent that has left for a lost one."""
        known = self._board.known.events

        def is_known() -> bool:
            silent = CLOCK.now() - self._monitor_asked
            return self._monitor_events >= known or silent > FAREWELL_SECONDS

        with suppress(DeadlineError):
            wait_for("the next question of the monitor", is_known, FAREWELL_SECONDS, longest_pause=_FAREWELL_PAUSE)

    def _vouched(self) -> str | None:
        """The answer to the monitor: the numbers of documents (`ChangeBoard.known`)."""
        if not self._vouch():
            return None
        known = self._board.known
        self._monitor_asked, self._monitor_events = CLOCK.now(), known.events
        return msgspec.json.encode(known).decode()


class PeerRecords:
    """The node records of the ranks that this agent asks, with the addresses at which they answer; each read once."""

    def __init__(self, directory: SharedDir, run_id: str, attempt: str) -> None:
        """`directory` is that of the rendezvous."""
        self._directory, self._run_id, self._attempt = directory, run_id, attempt
        self._records: dict[int, NodeInfo] = {}
        self.addresses: Mapping[int, str] = {}

    def connect(self, rank: int) -> PeerConnection:
        """A connection to a rank's agent; `OSError` if it has no record, or does not answer."""
        return PeerConnection(self._run_id, self._record(rank), ANSWER_SECONDS)

    def is_reached(self, rank: int, witnesses: list[int]) -> bool:
        """Whether any of these ranks gets the proof of a rank's agent, within a few seconds."""
        records = list[NodeInfo]()
        with suppress(OSError):
            suspect = self._record(rank)
            for witness in witnesses:
                with suppress(OSError):
                    records.append(self._record(witness))
            return bool(records) and bool(find_addresses(self._run_id, [suspect], records))
        return False

    def _record(self, rank: int) -> NodeInfo:
        """The record of a rank, with the address at which it answers; `OSError` without one."""
        if rank not in self._records:
            self._records[rank] = self._find(rank)
        return self._records[rank]

    def _find(self, rank: int) -> NodeInfo:
        node_info = read_node_info(self._directory, rank)
        if node_info is None or node_info.attempt != self._attempt:
            raise ConnectionError(f"rank {rank} has no node record")
        # An address of the record may be that of another node, as those of bridges to containers are.
        address = self.addresses.get(rank) or find_addresses(self._run_id, [node_info]).get(rank)
        if address is None:
            raise ConnectionError(f"rank {rank} does not answer")
        return msgspec.structs.replace(node_info, addresses=(address,))


class PeerLink:
    """The connection to the agent of one rank, by which another agent monitors it."""

    def __init__(
        self, records: PeerRecords, rank: int, note: Callable[[ChangeCounts], None] = lambda counts: None
    ) -> None:
        """`note` is called with the numbers of documents in each answer."""
        self.rank, self._records, self._note = rank, records, note
        self._peer: PeerConnection | None = None

    def look(self) -> LinkSign:
        """Ask the agent whether it runs, over the connection of the last answer; without one, or without an answer, a
        new connection shows why. Takes at most about three `ANSWER_SECONDS`."""
        if self._peer is not None and self._answers(self._peer):
            return "answers"
        self.close()
        try:
            peer = self._records.connect(self.rank)
        except ConnectionRefusedError:
            return "refuses"
        except TimeoutError:
            return "unreachable"
        except OSError as error:
            return "unreachable" if error.errno in _UNREACHABLE else "unknown"
        if self._answers(peer):
            self._peer = peer
            return "answers"
        peer.close()
        return "accepts"

    def close(self) -> None:
        """End the connection."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def _answers(self, peer: PeerConnection) -> bool:
        with suppress(OSError, msgspec.DecodeError):
            self._note(msgspec.json.decode(peer.ask(_encode(None), ANSWER_SECONDS), type=ChangeCounts))
            return True
        return False


class AncestorLink:
    """Follows the nearest ancestor that answers, in a thread while the block runs.

    Attributes:
        ancestor: the rank that it follows; None while none answers.
    """

    def __init__(self, board: ChangeBoard, records: PeerRecords, retry_seconds: float = RETRY_SECONDS) -> None:
        self._board, self._records, self._retry_seconds = board, records, retry_seconds
        self._over = threading.Event()
        self._peer: PeerConnection | None = None
        self.ancestor: int | None = None
        self._thread = threading.Thread(target=self._run, name="ancestor", daemon=True)

    def __enter__(self) -> "AncestorLink":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if peer := self._peer:
            peer.close()
        self._thread.join(timeout=1.0)  # a read of a record may hang on a dead file system

    def _run(self) -> None:
        while not self._over.is_set():
            for rank in ancestors(self._board.rank):
                with suppress(OSError, msgspec.DecodeError):
                    self._follow(rank)
                self.ancestor = None
                self._board.note_link_lost()
                if self._over.is_set():
                    return
            if self._over.wait(self._retry_seconds):
                return

    def _follow(self, rank: int) -> None:
        """Ask one ancestor again and again; raises `OSError` when the link is lost."""
        with self._records.connect(rank) as self._peer:
            # The first answer is not held: it shows that the ancestor gives hints, and how many documents there are.
            seen: ChangeCounts = ChangeCounts(events=-1, revisions=-1)
            while not self._over.is_set():
                answer = self._peer.ask(_encode(seen), HOLD_SECONDS + LATE_ANSWER_SECONDS)
                self._board.note_report(msgspec.json.decode(answer, type=ChangeCounts))
                self.ancestor = rank
                seen = self._board.known


class ControlLinks:
    """All links of one agent: follows an ancestor while the block runs, and answers others whenever they ask."""

    def __init__(self, paths: AttemptPaths, rank: int, ranks: int, vouch: Callable[[], bool]) -> None:
        """`vouch` as in `LinkResponder`."""
        self.board = ChangeBoard(rank, ranks)
        self._peers = PeerRecords(FileSharedDir(paths.rendezvous), paths.run_id, paths.attempt)
        self._responder, self._link = LinkResponder(self.board, vouch), AncestorLink(self.board, self._peers)
        self._monitored: PeerLink | None = None

    @property
    def ancestor(self) -> int | None:
        """The rank that this agent follows; None while none answers."""
        return self._link.ancestor

    def use_addresses(self, addresses: Mapping[int, str]) -> None:
        """Connect to these ranks at these addresses, which the leader has verified; a rank that does not answer at the
        first look can then count as lost too."""
        self._peers.addresses = addresses

    def answer(self, question: str) -> str | None:
        return self._responder.answer(question)

    def look(self, rank: int) -> LinkSign:
        """What the link to a rank shows now. One rank at a time is monitored, in one thread."""
        if self._monitored is None or self._monitored.rank != rank:
            self._end_monitoring()
            self._monitored = PeerLink(self._peers, rank, self.board.note_hint)
        return self._monitored.look()

    def is_reached(self, rank: int) -> bool:
        """Whether one of `MAX_WITNESSES` other ranks reaches a rank."""
        return self._peers.is_reached(rank, witnesses(rank, self.board.rank, self.board.ranks))

    def schedule(self, kind: ChangeKind, min_seconds: float = 0.0) -> LinkedSchedule:
        """The reads of documents of one kind."""
        return LinkedSchedule(self.board, kind, min_seconds=min_seconds)

    def __enter__(self) -> "ControlLinks":
        self._link.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_monitoring()
        self._link.__exit__(kind, error, at)
        self._responder.take_leave()

    def _end_monitoring(self) -> None:
        if self._monitored is not None:
            self._monitored.close()


def witnesses(rank: int, observer: int, ranks: int) -> list[int]:
    """The ranks that the observer of a rank asks whether they reach it: those that it follows in the tree, which are
    spread over the run, and those after it.

    >>> witnesses(300, observer=299, ranks=4096)
    [18, 1, 0]
    >>> witnesses(1, observer=0, ranks=4)
    [2, 3]
    """
    near = ((rank + distance) % ranks for distance in range(1, min(ranks, 2 * MAX_WITNESSES)))
    others = dict.fromkeys(other for other in (*ancestors(rank), *near) if other not in (rank, observer))
    return list(others)[:MAX_WITNESSES]


def _encode(seen: ChangeCounts | None) -> str:
    return msgspec.json.encode(LinkQuestion(seen)).decode()
