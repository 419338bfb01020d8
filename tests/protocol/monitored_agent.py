"""An agent that monitors the next rank, as a process of its own, with quicker timeouts than a run's.

    python -m tests.protocol.monitored_agent RUN RANK RANKS

Prints `answers` when its neighbor answers for the first time, and the name of each event that it reads. A line
`lose ADDRESS` on standard input loses all packets that arrive from this address, on the open link and on new ones.
After a line `late` it finds no event that it has not read yet, as on a file system whose names appear late. A lost
neighbor is recorded as a run's agent does it. Ends with standard input, or an empty line.
"""

import select
import sys
from functools import partial
from pathlib import Path

import msgspec

from pipeline.run.events import EventPoller, Events
from pipeline.run.paths import EVENTS, AttemptPaths
from pipeline.utils import late_names
from pipeline.utils.packet_loss import drop_packets, lose_new_connections
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent import agent_heartbeat, control_link, loss_rule, neighbor_watch
from slurm.agent.agent import _handle_lost_rank
from slurm.agent.agent_heartbeat import HeartbeatFile, agent_name
from slurm.agent.control_link import ControlLinks
from slurm.agent.loss_rule import LinkSign
from slurm.agent.neighbor_watch import NeighborWatch
from slurm.rendezvous.membership import publish_node_info
from slurm.rendezvous.probe_server import ProbeServer
from tests.fakes.configs import make_config
from tests.fakes.ranks import make_node_infos

RUN, ATTEMPT, TOKEN = "run", "7-0", "token"
SCALE = 0.2
TOUCH_SECONDS = 1000.0
"""Regular touches are left out, so that only those in place of a lost link show that an agent runs."""
TIMEOUTS = (
    (loss_rule, "REFUSED_SECONDS"),
    (loss_rule, "UNREACHABLE_SECONDS"),
    (neighbor_watch, "LOOK_SECONDS"),
    (agent_heartbeat, "LATE_SECONDS"),
    (agent_heartbeat, "_WAKE_SECONDS"),
)


def address_of(rank: int) -> str:
    return f"127.0.0.{2 + rank}"


class PrintingLinks(ControlLinks):
    """Links that print the first answer of the monitored rank, and lose packets."""

    has_answered = False

    def look(self, rank: int) -> LinkSign:
        sign = super().look(rank)
        if sign == "answers" and not self.has_answered:
            self.has_answered = True
            print("answers", flush=True)
        return sign

    def drop_packets(self, address: str) -> None:
        """Lose what arrives on the monitored rank's open link, if it has this address."""
        peer = self._monitored._peer if self._monitored is not None else None
        if peer is not None and peer._socket.getpeername()[0] == address:
            drop_packets(peer._socket)


def serve(paths: AttemptPaths, links: PrintingLinks, ranks: int, lost: set[str]) -> None:
    poller, printed = EventPoller(Events(paths), ranks, schedule=links.schedule("events")), 0
    while True:
        for name in list(poller.poll())[printed:]:
            print(name, flush=True)
            printed += 1
        if select.select([sys.stdin], [], [], 0.02)[0]:
            command = sys.stdin.readline().split()
            match command:
                case []:
                    return
                case ["late"]:
                    late_names.hide(lambda path: path.parent.name == EVENTS)
                case [_, address]:
                    lost.add(address)
                    links.drop_packets(address)


def main(run: Path, rank: int, ranks: int) -> None:
    for module, name in TIMEOUTS:
        setattr(module, name, getattr(module, name) * SCALE)
    control_link.ANSWER_SECONDS = 0.25
    lost = set[str]()
    lose_new_connections(lambda address: address in lost)
    paths, address = AttemptPaths(run, RUN, ATTEMPT), address_of(rank)
    with HeartbeatFile(paths, rank, TOUCH_SECONDS) as heartbeat:
        links = PrintingLinks(paths, rank, ranks, heartbeat.vouch)
        with ProbeServer(RUN, ATTEMPT, rank, address, TOKEN, links.answer) as server:
            record = make_node_infos(rank + 1, attempt=ATTEMPT)[rank]
            record = msgspec.structs.replace(record, addresses=(address,), probe_port=server.port, token=TOKEN)
            publish_node_info(FileSharedDir(paths.rendezvous), record)
            links.use_addresses({other: address_of(other) for other in range(ranks)})
            report = partial(_handle_lost_rank, paths, make_config(), agent_name(rank), links.board)
            with links, NeighborWatch(paths, rank, ranks, 120.0, report, links):
                serve(paths, links, ranks, lost)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
