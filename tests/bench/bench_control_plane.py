"""What the agents of a run ask of the shared file system, and when the last agent knows of a failure or of the end.

    python -m tests.bench.bench_control_plane [RANKS ...] [--links [RANKS ...]] [--losses [RANKS ...]]

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

`--losses` simulates the loss of one agent instead: the seconds until it is recorded, and until the last agent has read
that. Exits with 1 unless an ended process and a vanished node are recorded within `MAX_LOSS_SECONDS`, and neither a cut
link nor a node that only lost its network is recorded at all.

| fault | its link | its file |
|---|---|---|
| `killed` | refuses | stays |
| `vanished` | unreachable, also for others | stays |
| `stopped` | accepts | stays |
| `link cut` | unreachable for its monitor alone | touched |
| `network cut` | unreachable, also for others | touched |
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
from slurm.agent.agent_heartbeat import HeartbeatFile, OtherAgents, mark_down
from slurm.agent.control_link import ControlLinks
from slurm.agent.control_tree import ChangeBoard, LinkedSchedule, ancestors
from slurm.agent.loss_rule import LOOK_SECONDS, LinkSign
from slurm.agent.neighbor_watch import NO_PEERS, NeighborCheck
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
HEARTBEAT_SECONDS, MAX_LOSS_SECONDS = 180.0, 30.0
SIGNS: dict[str, LinkSign] = {
    "killed": "refuses",
    "vanished": "unreachable",
    "stopped": "accepts",
    "link cut": "unreachable",
    "network cut": "unreachable",
}
SURVIVED = ("link cut", "network cut")
RUN, ATTEMPT, CONFIG = "run-1", "7-0", make_config()
OPERATIONS = frozenset({"open", "os.scandir", "os.mkdir", "os.utime", "os.link", "os.rename", "os.remove"})
LOSS_COLUMNS = ("ranks", "fault", "s to the record", "s to the last agent", "operations/s meanwhile")
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
    look_seconds: float
    lost: str = ""
    knows: dict[EventName, float] = field(default_factory=dict)

    def act(self, now: float) -> None:
        for event in self.poller.poll():
            self.knows.setdefault(event, now)
        self.follower.poll()
        if now >= self.touched:
            self.heartbeat.touch_if_due()
        if now >= self.watched and not self.lost:
            self.watched += self.look_seconds
            self.lost = self.neighbor.look()


class SimulatedPeers:
    """The links of all agents."""

    def __init__(self, agents: Sequence[SimulatedAgent], way: str) -> None:
        self.agents, self.way = agents, way
        self.fault, self.faulty = "", -1

    def look(self, rank: int) -> LinkSign:
        if rank == self.faulty:
            return SIGNS[self.fault]
        if self.way == "tree, cut":
            return "unreachable"
        self.agents[rank].heartbeat.vouch()
        return "answers"

    def is_reached(self, rank: int) -> bool:
        return self.fault == "link cut"


class Simulation:
    """The agents of one attempt with `ranks` ranks."""

    def __init__(
        self, root: Path, ranks: int, way: str, counter: FileCounter, heartbeat_seconds: float = NEVER_LOST
    ) -> None:
        self.ranks, self.way, self.counter, self._heartbeat_seconds = ranks, way, counter, heartbeat_seconds
        self.clock, self._random = FakeClock(), Random(ranks)
        self.paths = AttemptPaths(root, RUN, ATTEMPT)
        for folder in self.paths.shared:
            folder.mkdir(parents=True)
        world = World(
            run_id=RUN, attempt=ATTEMPT, epoch=1, leader=0, secret="", placements=(), spares=make_node_infos(1)[:1]
        )
        FileSharedDir(self.paths.rendezvous).create(WORLD, world)
        self.touch_seconds = TOUCH_SECONDS if way == "files" else touch_interval(ranks)
        self.agents = list[SimulatedAgent]()
        self.peers = SimulatedPeers(self.agents, way)
        self.agents.extend(self._agent(rank) for rank in range(ranks))

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
            self._heartbeat_seconds,
            self.clock,
            peers=NO_PEERS if self.way == "files" else self.peers,
            touch_seconds=0.0 if self.way == "files" else self.touch_seconds,
        )
        return SimulatedAgent(
            board,
            EventPoller(Events(paths), self.ranks, self.clock, events),
            WorldFollower(paths, CONFIG, rank, revisions),
            HeartbeatFile(paths, rank, self.touch_seconds, self.clock),
            neighbor,
            touched=self._random.uniform(0, self.touch_seconds),
            watched=self._random.uniform(0, TOUCH_SECONDS),
            look_seconds=TOUCH_SECONDS if self.way == "files" else LOOK_SECONDS,
        )

    def advance(self, until: Callable[[], bool], begin: Callable[[int], bool] = lambda rank: True) -> None:
        while not until():
            if self.way == "tree":
                self._send_hints()
            for rank, agent in enumerate(self.agents):
                if begin(rank):
                    agent.act(self.clock.now())
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

    def lose(self, fault: str) -> tuple[float | str, ...]:
        """The figures of `LOSS_COLUMNS` after the fault."""
        faulty, runs = self.ranks // 2, fault in SURVIVED
        monitor = self.agents[faulty - 1]

        def begin(rank: int) -> bool:
            return runs or rank != faulty or not self.peers.fault

        self.advance(lambda: self.clock.now() >= WARM_UP)
        self.peers.fault, self.peers.faulty, began = fault, faulty, self.clock.now()
        self.counter.reset()
        self.advance(lambda: bool(monitor.lost) or self.clock.now() >= began + 1.5 * HEARTBEAT_SECONDS, begin)
        seconds = self.clock.now() - began
        rate = self.counter.operations / seconds
        if not monitor.lost:
            return "never", "", rate
        return seconds, seconds + self._seconds_to_know("failed", begin), rate

    def _seconds_to_know(self, event: EventName, begin: Callable[[int], bool] = lambda rank: True) -> float:
        """Seconds from the publication of an event, by a process that is no agent, until the last agent has read it."""
        Events(self.paths).publish(event, "trainer.0")
        began = self.clock.now()
        readers = [agent for rank, agent in enumerate(self.agents) if begin(rank)]
        self.advance(lambda: all(event in agent.knows for agent in readers), begin)
        return max(agent.knows[event] for agent in readers) - began

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
    with simulation_of(ranks, way, counter) as simulation:
        return simulation.run()


def simulate_loss(ranks: int, fault: str, counter: FileCounter) -> tuple[float | str, ...]:
    with simulation_of(ranks, "tree", counter, HEARTBEAT_SECONDS) as simulation:
        return simulation.lose(fault)


@contextmanager
def simulation_of(
    ranks: int, way: str, counter: FileCounter, heartbeat_seconds: float = NEVER_LOST
) -> Iterator[Simulation]:
    with tempfile.TemporaryDirectory() as folder:
        counter.root = ""  # the preparation does not count
        simulation = Simulation(Path(folder), ranks, way, counter, heartbeat_seconds)
        counter.root = folder
        yield simulation


def measure_losses(sizes: Sequence[int], counter: FileCounter) -> int:
    """Print the table of losses; returns the exit code."""
    figures = dict[tuple[int, str], tuple[float | str, ...]]()
    for case in product(sizes, SIGNS):
        figures[case] = simulate_loss(*case, counter)
        print(*case, *figures[case], file=sys.stderr, flush=True)
    print(markdown(LOSS_COLUMNS, [(*case, *row) for case, row in figures.items()]))
    survived = all(row[0] == "never" for (_, fault), row in figures.items() if fault in SURVIVED)
    known = [row[1] for (_, fault), row in figures.items() if fault in ("killed", "vanished")]
    found = all(isinstance(seconds, float) and seconds <= MAX_LOSS_SECONDS for seconds in known)
    return judge(f"losses known within {MAX_LOSS_SECONDS:g} s, and no cut network is a loss", found and survived)


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
    parser.add_argument("--losses", type=int, nargs="*")
    given = parser.parse_args(words)
    if given.links is not None:
        rows = [(ranks, measure_links(ranks)) for ranks in given.links or (16, 256)]
        print(markdown(("ranks", "s to the last agent"), rows))
        return 0
    counter = FileCounter()
    if given.losses is not None:
        return measure_losses(given.losses or SIZES, counter)
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
