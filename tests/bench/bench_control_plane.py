"""What the agents of a run ask of the shared file system, and when the last agent knows of a failure or of the end.

    python -m tests.bench.bench_control_plane [RANKS ...] [--links [RANKS ...]]

Exits with 1 unless the largest run makes with links at most a tenth of the file operations that it makes without, and
its last agent knows of both events within `MAX_SECONDS`.

All agents take turns in this one process, on simulated time and on real files below the temporary directory. What runs
is the agents' own code: heartbeat files, the watch of the next rank, events and revisions of the world (the run has a
spare node), the tree's boards, and the wait for the last exit marker. An audit hook counts every file operation that
Python makes below the run directory; `KiB/s` are the bytes of files that are read and of names that are listed (with
`ENTRY_BYTES` for each entry). Links are simulated too: a hint needs one tick of `TICK` seconds through the whole tree.

| way | |
|---|---|
| `files` | no agent asks another one: what the agents did before they had links, but for one `mkdir` a touch |
| `tree` | every agent has a link, and answers the agent that watches it |
| `tree, cut` | every link was lost, and no agent answers |

`--links` starts the links themselves instead: agents with real sockets in this process, and the seconds until a hint
has reached the last of them.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from pipeline.run.events import EventName, EventPoller, Events
from pipeline.run.paths import WORLD, AttemptPaths
from pipeline.run.poll_rates import TOUCH_SECONDS, ReadSchedule, poll_interval, touch_interval
from pipeline.topology.plan import NodeInfo, World
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import exponential_pauses, wait_for
from slurm.agent.agent import FOLLOW_SECONDS, LEAVE_PAUSE
from slurm.agent.agent_heartbeat import HeartbeatFile, NeighborCheck, OtherAgents, mark_down
from slurm.agent.control_link import ControlLinks
from slurm.agent.control_tree import ChangeBoard, LinkedSchedule, ancestors
from slurm.agent.node_takeover import WorldFollower
from slurm.rendezvous.membership import publish_node_info
from slurm.rendezvous.probe_server import ProbeServer
from tests.bench.tables import judge, markdown
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.ranks import make_node_infos

SIZES = (16, 256, 1024, 4096)
WAYS = ("files", "tree", "tree, cut")
TICK, WARM_UP, STEADY, EXIT_SECONDS = 0.1, 30.0, 60.0, 5.0
ENTRY_BYTES = 24
NEVER_LOST = 1e9
MAX_FRACTION, MAX_SECONDS = 0.1, 2.0
RUN, ATTEMPT, CONFIG = "run-1", "7-0", make_config()
OPERATIONS = frozenset({"open", "os.scandir", "os.mkdir", "os.utime", "os.link", "os.rename", "os.remove"})
COLUMNS = ("ranks", "way", "operations/s", "KiB/s", "s to the failure", "s to the end", "exit: operations", "MiB", "s")


class FileCounter:
    """Counts the file operations of this process below `root`."""

    def __init__(self) -> None:
        self.root, self.operations, self.bytes = "", 0, 0
        self._inside, self._listings = False, dict[tuple[str, int], int]()
        sys.addaudithook(self._note)

    def reset(self) -> None:
        self.operations = self.bytes = 0

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or self._inside or not self.root or not str(arguments[0]).startswith(self.root):
            return
        self._inside = True  # what this method asks of the disk does not count
        try:
            self.operations += 1
            self.bytes += self._bytes_of(event, str(arguments[0]), arguments)
        except FileNotFoundError:
            return
        finally:
            self._inside = False

    def _bytes_of(self, event: str, path: str, arguments: tuple[Any, ...]) -> int:
        if event == "os.scandir":
            version = path, os.stat(path).st_mtime_ns
            if version not in self._listings:
                self._listings[version] = sum(ENTRY_BYTES + len(name) for name in os.listdir(path))  # noqa: PTH208
            return self._listings[version]
        is_read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
        return os.stat(path).st_size if is_read else 0


@dataclass
class SimulatedAgent:
    """The accesses of one agent to the shared file system. `touched` and `watched` are the times of the next ones."""

    board: ChangeBoard
    poller: EventPoller
    follower: WorldFollower
    heartbeat: HeartbeatFile
    neighbor: NeighborCheck
    touched: float
    watched: float
    knows: dict[EventName, float] = field(default_factory=dict)

    def act(self, now: float, touch_seconds: float) -> None:
        for event in self.poller.poll():
            self.knows.setdefault(event, now)
        self.follower.poll()
        if now >= self.touched:
            self.touched += touch_seconds
            self.heartbeat.touch()
        if now >= self.watched:
            self.watched += TOUCH_SECONDS
            self.neighbor.look()


class Simulation:
    """The agents of one attempt with `ranks` ranks."""

    def __init__(self, root: Path, ranks: int, way: str, counter: FileCounter) -> None:
        self.ranks, self.way, self.counter = ranks, way, counter
        self.clock, self._random = FakeClock(), Random(ranks)
        self.paths = AttemptPaths(root, RUN, ATTEMPT)
        for folder in self.paths.shared:
            folder.mkdir(parents=True)
        world = World(
            run_id=RUN, attempt=ATTEMPT, epoch=1, leader=0, secret="", placements=(), spares=make_node_infos(1)[:1]
        )
        FileSharedDir(self.paths.rendezvous).create(WORLD, world)
        self.touch_seconds = TOUCH_SECONDS if way == "files" else touch_interval(ranks)
        self.agents = [self._agent(rank) for rank in range(ranks)]

    def _agent(self, rank: int) -> SimulatedAgent:
        board, paths = ChangeBoard(rank, self.ranks, self.clock), self.paths
        events: ReadSchedule = ReadSchedule(self.ranks, self.clock)
        revisions: ReadSchedule = _FixedSchedule(FOLLOW_SECONDS, self.clock)
        if self.way != "files":
            events = LinkedSchedule(board, "events", self.clock)
            revisions = LinkedSchedule(board, "revisions", self.clock, FOLLOW_SECONDS)
        neighbor = NeighborCheck(
            paths,
            (rank + 1) % self.ranks,
            NEVER_LOST,
            self.clock,
            answers=lambda _: self.way == "tree",
            read_seconds=0.0 if self.way == "files" else self.touch_seconds,
        )
        return SimulatedAgent(
            board,
            EventPoller(Events(paths), self.ranks, self.clock, events),
            WorldFollower(paths, CONFIG, rank, revisions),
            HeartbeatFile(paths, rank, self.touch_seconds, self.clock),
            neighbor,
            touched=self._random.uniform(0, self.touch_seconds),
            watched=self._random.uniform(0, TOUCH_SECONDS),
        )

    def advance(self, until: Callable[[], bool], begin: Callable[[int], bool] = lambda rank: True) -> None:
        while not until():
            if self.way == "tree":
                self._send_hints()
            for rank, agent in enumerate(self.agents):
                if begin(rank):
                    agent.act(self.clock.now(), self.touch_seconds)
            self.clock.time += TICK

    def _send_hints(self) -> None:
        """What the links do: each agent gets the counts that its parent knows."""
        for agent in self.agents[1:]:
            known = self.agents[ancestors(agent.board.rank)[0]].board.known
            if not agent.board.is_linked or known.exceeds(agent.board.known):
                agent.board.note_report(known)

    def run(self) -> tuple[float, ...]:
        """The figures of `COLUMNS` after the way."""
        starts = [self._random.uniform(0, poll_interval(self.ranks)) for _ in self.agents]
        self.advance(lambda: self.clock.now() >= WARM_UP, lambda rank: self.clock.now() >= starts[rank])
        self.counter.reset()
        steady = self.clock.now() + STEADY
        self.advance(lambda: self.clock.now() >= steady)
        rate, read = self.counter.operations / STEADY, self.counter.bytes / STEADY / 2**10
        failure, end = (self._seconds_to_know(event) for event in ("failed", "training_finished"))
        # The wait for exit markers has nothing to do with links.
        return rate, read, failure, end, *(self._exit() if self.way == "tree" else ())

    def _seconds_to_know(self, event: EventName) -> float:
        """Seconds from the publication of an event, by a process that is no agent, until the last agent has read it."""
        Events(self.paths).publish(event, "trainer.0")
        began = self.clock.now()
        self.advance(lambda: all(event in agent.knows for agent in self.agents))
        return max(agent.knows[event] for agent in self.agents) - began

    def _exit(self) -> tuple[float, ...]:
        """All agents exit within `EXIT_SECONDS`, and each waits for the last marker: operations, MiB and seconds."""
        self.counter.reset()
        attempt, began, last = FileSharedDir(self.paths.root), self.clock.now(), 0.0
        pauses = [exponential_pauses(0.02, max(LEAVE_PAUSE, poll_interval(self.ranks))) for _ in self.agents]
        due = {rank: began + self._random.uniform(0, EXIT_SECONDS) for rank in range(self.ranks)}
        waits = dict[int, OtherAgents]()
        while due:
            for rank in [rank for rank, at in due.items() if at <= self.clock.now()]:
                if rank not in waits:
                    mark_down(attempt, rank, self.clock)
                    waits[rank] = OtherAgents(attempt, self.ranks, self.clock)
                due[rank] = self.clock.now() + next(pauses[rank])
                if waits[rank].have_exited():
                    last = self.clock.now() - began
                    del due[rank]
            self.clock.time += TICK
        return self.counter.operations, self.counter.bytes / 2**20, last


class _FixedSchedule(ReadSchedule):
    """A read every `seconds`, for any number of ranks."""

    def __init__(self, seconds: float, clock: FakeClock) -> None:
        super().__init__(1, clock)
        self._seconds = seconds


def simulate(ranks: int, way: str, counter: FileCounter) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory() as folder:
        counter.root = ""  # the preparation does not count
        simulation = Simulation(Path(folder), ranks, way, counter)
        counter.root = folder
        return simulation.run()


def measure_links(ranks: int) -> float:
    """Seconds in which a hint of rank 0 reaches the last of so many agents with real links."""
    with (
        tempfile.TemporaryDirectory() as folder,
        linked_agents(AttemptPaths(Path(folder), RUN, ATTEMPT), ranks) as all_,
    ):
        boards = [links.board for links in all_]
        wait_for("all links", lambda: all(board.is_linked for board in boards[1:]), 120)
        began = time.monotonic()
        boards[0].note_read("events", 1)
        wait_for("the hint", lambda: all(board.known.events for board in boards), 60, longest_pause=0.02)
        return time.monotonic() - began


@contextmanager
def linked_agents(paths: AttemptPaths, ranks: int) -> Iterator[list[ControlLinks]]:
    """Agents with their probe servers and links, in this process."""
    directory, agents = FileSharedDir(paths.rendezvous), []
    with ExitStack() as stack:
        for rank in range(ranks):
            links = ControlLinks(paths, rank, ranks, lambda: True)
            server = stack.enter_context(ProbeServer(RUN, ATTEMPT, rank, "127.0.0.1", "token", links.answer))
            record = NodeInfo(
                rank=rank,
                attempt=ATTEMPT,
                hostname="node",
                pid=os.getpid(),
                boot="boot",
                addresses=("127.0.0.1",),
                probe_port=server.port,
                ports=(),
                token="token",
            )
            publish_node_info(directory, record)
            agents.append(links)
        agents[0].board.note_read("events", 0)
        for links in agents:
            stack.enter_context(links)
        yield agents


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, nargs="*", default=SIZES)
    parser.add_argument("--links", type=int, nargs="*")
    given = parser.parse_args(words)
    if given.links is not None:
        rows = [(ranks, measure_links(ranks)) for ranks in given.links or (16, 256)]
        print(markdown(("ranks", "s to the last agent"), rows))
        return 0
    counter = FileCounter()
    figures = {}
    for case in product(sorted(given.ranks), WAYS):
        figures[case] = simulate(*case, counter)
        print(*case, *figures[case], file=sys.stderr, flush=True)
    print(markdown(COLUMNS, [(*case, *row, *[""] * (len(COLUMNS) - 2 - len(row))) for case, row in figures.items()]))
    ranks = max(given.ranks)
    rate, _, *seconds = figures[ranks, "tree"][:4]
    fraction = rate / figures[ranks, "files"][0]
    rule = f"{fraction:.3f} of the operations at {ranks} ranks, at most {MAX_FRACTION:g}, in at most {MAX_SECONDS:g} s"
    return judge(rule, fraction <= MAX_FRACTION and max(seconds) <= MAX_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
