"""One rank of a rendezvous as a process of its own: prints the world it gets, or the error on standard error.

    python -m tests.protocol.rank DIRECTORY ATTEMPT RANK RANKS SPARES SECONDS LEASE TIME PLACE [--hold NAME]

Its clock is the one at the path TIME (`tests.protocol.shared_time`). With `--hold` it says `holding` before it creates
the file of that name, and goes on when it may read a line.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import RollcallError
from pipeline.topology.plan import NodeBundle, NodeInfo, Plan, RoleProcess
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import Clock
from slurm.agent.preflight import node_id
from slurm.rendezvous.probe_server import ProbeServer
from slurm.rendezvous.rank_meeting import rendezvous
from tests.protocol.shared_time import SharedClock


class HeldDirectory(FileSharedDir):
    """Stops before one file is created, so that a test can act exactly there."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        self._name = name

    def create(self, name: str, document: Any) -> bool:
        if name == self._name:
            print("holding", flush=True)
            sys.stdin.readline()
        return super().create(name, document)


def make_plan(ranks: int, spares: int) -> Plan:
    seats = tuple(
        NodeBundle(roles=(RoleProcess(role="inference", index=index, ports=1),)) for index in range(ranks - spares)
    )
    return Plan(ranks=ranks, bundles=seats)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("attempt")
    for number in ("rank", "ranks", "spares"):
        parser.add_argument(number, type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("lease", type=float)
    parser.add_argument("time", type=Path)
    parser.add_argument("place", type=int)
    parser.add_argument("--hold", default="")
    return parser.parse_args()


def take_part(given: argparse.Namespace, clock: Clock) -> int:
    address = f"127.0.0.{given.rank + 2}"
    with ProbeServer("run", given.attempt, given.rank, address) as beacon:
        node_info = NodeInfo(
            rank=given.rank,
            attempt=given.attempt,
            hostname=f"node{given.rank}",
            pid=os.getpid(),
            boot=node_id(),
            addresses=(address,),
            probe_port=beacon.port,
            ports=(beacon.port,),
        )
        directory, plan = HeldDirectory(given.directory, given.hold), make_plan(given.ranks, given.spares)
        try:
            world = rendezvous(
                directory, plan, node_info, run_id="run", seconds=given.seconds, lease=given.lease, clock=clock
            )
        except RollcallError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return error.exit_code
        print(msgspec.json.encode(world).decode(), flush=True)
        return 0


def main() -> int:
    given = read_arguments()
    clock = SharedClock(given.time, given.place)
    try:
        return take_part(given, clock)
    finally:
        clock.leave()


if __name__ == "__main__":
    sys.exit(main())
