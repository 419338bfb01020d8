"""How long weights take to reach many servers over TCP, with and without servers that forward them: a model of time.

    python -m tests.bench.bench_relay [--servers 8 64 512] [--gigabytes 16] [--gigabits 25] [--latency-ms 0.2]

The tree is that of `RelayPlan`; chunks have the size of the gloo transport's. Every node sends and receives with the
same bandwidth, in both directions at once. A node that sends to several sends them a chunk each in turn. A chunk is
there one latency after its last byte was sent, and is forwarded then. A server begins `--begin-ms` after its source has
begun: the HTTP calls of an update. The last column has the seconds when the first server of the tree is lost after half
of the bytes: each level notices at once, meets its source again within `--meet-ms`, and everything is sent once more.

| way | |
|---|---|
| `direct` | the trainer sends to every server |
| `direct, 8 ranks` | as many nodes of the trainer send an eighth to every server |
| `whole, fanout 2` | servers forward a version once they have all of it |
| `fanout f` | servers forward chunks as they arrive, to at most f others |

Exits with 1 unless with a fanout of 2 the trainer sends the model once, and the largest number of servers has it within
`MAX_FACTOR` times the seconds of a single server.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.inference.weight_sync.relay_plan import RelayPlan
from pipeline.topology.memory_budget import WEIGHT_CHUNK
from tests.bench.tables import judge, markdown

COLUMNS = ("servers", "way", "models sent by the trainer", "s to the last server", "s with its first relay lost")
FANOUTS = (1, 2, 4, 8)
MAX_FACTOR = 3.0


@dataclass(frozen=True)
class Network:
    """The model of time: bytes, bytes a second, and seconds."""

    model: float
    rate: float
    latency: float
    begin: float
    meet: float

    @property
    def chunks(self) -> int:
        return max(1, round(self.model / WEIGHT_CHUNK))

    @property
    def chunk_seconds(self) -> float:
        return self.model / self.chunks / self.rate


def direct(network: Network, servers: int, ranks: int = 1) -> float:
    """Seconds until the last server has the model: the trainer's link limits them, or that of each server."""
    return network.begin + max(servers / ranks, 1) * network.model / network.rate + network.latency


def relayed(network: Network, servers: int, fanout: int, *, whole: bool = False) -> float:
    """Seconds until the last server of the tree has the last chunk."""
    plan = RelayPlan(fanout)
    for server in range(servers):
        plan.join(str(server))
    children: dict[str | None, list[str]] = {}
    for server in range(servers):
        children.setdefault(plan.source_of(str(server)), []).append(str(server))
    begun: dict[str | None, float] = {None: 0.0}
    arrivals: dict[str | None, list[float]] = {None: [0.0] * network.chunks}
    for sender in (None, *map(str, range(servers))):  # a source comes before its children
        fed, free = children.get(sender, []), 0.0
        for child in fed:
            begun[child] = begun[sender] + network.begin
            arrivals[child] = []
        available = [arrivals[sender][-1]] * network.chunks if whole else arrivals[sender]
        for at in available:
            for child in fed:
                free = max(free, at, begun[child]) + network.chunk_seconds
                arrivals[child].append(free + network.latency)
    return max(times[-1] for times in arrivals.values())


def depth_of(servers: int, fanout: int) -> int:
    """The number of levels of the tree."""
    depth, index = 1, servers - 1
    while index > 0:
        index, depth = (index - 1) // fanout, depth + 1
    return depth


def rows_of(network: Network, servers: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (servers, "direct", servers, direct(network, servers), ""),
        (servers, "direct, 8 ranks", servers, direct(network, servers, 8), ""),
        (servers, "whole, fanout 2", 1, relayed(network, servers, 2, whole=True), ""),
    ]
    for fanout in FANOUTS:
        seconds = relayed(network, servers, fanout)
        lost = network.begin + network.model / network.rate / 2 + network.meet * depth_of(servers - 1, fanout)
        rows.append((servers, f"fanout {fanout}", 1, seconds, lost + relayed(network, servers - 1, fanout)))
    return rows


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--gigabytes", type=float, default=16.0)
    parser.add_argument("--gigabits", type=float, default=25.0)
    parser.add_argument("--latency-ms", type=float, default=0.2)
    parser.add_argument("--begin-ms", type=float, default=20.0)
    parser.add_argument("--meet-ms", type=float, default=200.0)
    given = parser.parse_args(words)
    network = Network(
        model=given.gigabytes * 1e9,
        rate=given.gigabits / 8 * 1e9,
        latency=given.latency_ms / 1e3,
        begin=given.begin_ms / 1e3,
        meet=given.meet_ms / 1e3,
    )
    print(markdown(COLUMNS, [row for servers in given.servers for row in rows_of(network, servers)]))
    factor = relayed(network, max(given.servers), 2) / direct(network, 1)
    rule = f"{max(given.servers)} servers with a fanout of 2 in {factor:.2f} of a single server's seconds"
    return judge(f"{rule}, at most {MAX_FACTOR:g}", factor <= MAX_FACTOR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
