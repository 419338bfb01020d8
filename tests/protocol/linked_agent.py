"""The links of one agent as a process of its own: prints each event that it reads, and the rank that it follows.

    python -m tests.protocol.linked_agent RUN RANK RANKS

Prints `follows 0`, `follows None` and the names of events, one a line, until standard input ends. Answers are held,
and may be late, for half a second, so that tests need not wait for seconds.
"""

import select
import sys
from pathlib import Path

import msgspec

from pipeline.run.events import EventPoller, Events
from pipeline.run.paths import AttemptPaths
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent import control_link
from slurm.agent.agent_heartbeat import HeartbeatFile
from slurm.agent.control_link import ControlLinks
from slurm.rendezvous.membership import publish_node_info
from slurm.rendezvous.probe_server import ProbeServer
from tests.fakes.ranks import make_node_infos

RUN, ATTEMPT, TOKEN = "run", "7-0", "token"
HOLD_SECONDS = 0.5


def report_changes(paths: AttemptPaths, links: ControlLinks, ranks: int) -> None:
    """Do what the supervisor's loop does with events, until standard input ends."""
    poller, printed, ancestor = EventPoller(Events(paths), ranks, schedule=links.schedule("events")), 0, None
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        for name in list(poller.poll())[printed:]:
            print(name, flush=True)
            printed += 1
        if links.ancestor != ancestor:
            ancestor = links.ancestor
            print("follows", ancestor, flush=True)


def main(run: Path, rank: int, ranks: int) -> None:
    control_link.HOLD_SECONDS = control_link.LATE_ANSWER_SECONDS = HOLD_SECONDS
    paths = AttemptPaths(run, RUN, ATTEMPT)
    with HeartbeatFile(paths, rank) as heartbeat:
        links = ControlLinks(paths, rank, ranks, heartbeat.is_fresh)
        with ProbeServer(RUN, ATTEMPT, rank, "127.0.0.1", TOKEN, links.answer) as server:
            node_info = msgspec.structs.replace(
                make_node_infos(rank + 1, attempt=ATTEMPT)[rank],
                addresses=("127.0.0.1",),
                probe_port=server.port,
                token=TOKEN,
            )
            publish_node_info(FileSharedDir(paths.rendezvous), node_info)
            with links:
                report_changes(paths, links, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
