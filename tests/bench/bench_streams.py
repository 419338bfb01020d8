"""How fast the streams are: `python -m tests.bench.bench_streams [--groups N] [--rounds N]`.

Publishes, reads and acknowledges realistic groups (8 samples of 600 tokens) through the streams, on Redis and on files,
and sends the same bytes through plain XADD and XREADGROUP + XACK of the same server in the same run: on Redis's own
socket, and through the gate that every client of a run goes through (docs/decisions/0032). Prints groups/s, samples/s,
MB/s and the ratio to both, for one group a call and for many. Exits with 1 when the streams on Redis have less than
half of the speed of plain commands through the gate in any row: what the gate itself takes is that decision's price.
Each figure is the median of the rounds, which take turns. The streams' figures include packing and unpacking the
records, the byte accounting, and deleting what was acknowledged; the plain commands do none of it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import redis

from pipeline.roles.redis import owner_password
from pipeline.roles.role_context import RoleContext
from pipeline.transport import Streams, connect
from pipeline.transport.record_wire import encode_record
from pipeline.transport.sample_records import Group, Sample
from pipeline.utils.mutual_auth import introduce
from tests.bench.tables import judge, markdown
from tests.support.servers.redis_attempts import a_config, a_redis, raw_client, redis_context

SAMPLES, TOKENS, BULK = 8, 600, 16
BUDGET = 1 << 29
PLAIN, GATED, REDIS = "plain redis", "plain redis, gate", "streams, redis"
MIN_RATIO = 0.5
COLUMNS = ("direction", "groups a call", "way", "groups/s", "samples/s", "MB/s", "of plain redis", "of plain, gate")

Way = tuple[str, int, str]
"""Direction, groups a call, and what carries them."""
Times = dict[Way, list[float]]
_names = count()


def a_group(position: int) -> Group:
    """Eight samples of 600 random tokens."""
    random = np.random.default_rng(position)
    samples = tuple(
        Sample(
            tokens=random.integers(0, 150_000, TOKENS, dtype=np.int32).tobytes(),
            sampled=np.ones(TOKENS, dtype=np.uint8).tobytes(),
            logprobs=random.standard_normal(TOKENS, dtype=np.float32).tobytes(),
            reward=1.0,
            version_min=1,
            version_max=2,
            finish="stop",
        )
        for _ in range(SAMPLES)
    )
    return Group(position=position, prompt=position, samples=samples)


def portions(items: Iterable[bytes] | Iterable[Group], size: int) -> Iterator[list[bytes] | list[Group]]:
    rest = iter(items)
    while portion := list(islice(rest, size)):
        yield portion


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def gated_client(context: RoleContext) -> redis.Redis:
    """Redis as its owner, by the way that clients of a run take."""

    def prove(connection: Any) -> None:
        introduce(connection._sock, context.world.password, "redis")
        connection.on_connect()

    place = context.placement
    return redis.Redis(
        host=place.address,
        port=place.ports[0],
        username="owner",
        password=owner_password(context.world),
        protocol=2,
        socket_read_size=1 << 18,
        redis_connect_func=cast(Any, prove),
    )


def plain(client: redis.Redis, payloads: list[bytes], size: int) -> tuple[float, float]:
    """Seconds to XADD the payloads, and to XREADGROUP and XACK them, `size` a round trip."""
    stream = f"plain-{next(_names)}"
    client.xgroup_create(stream, "readers", id="0", mkstream=True)

    def write() -> None:
        for portion in portions(payloads, size):
            pipeline = client.pipeline(transaction=False)
            for payload in portion:
                pipeline.xadd(stream, {"d": payload})
            pipeline.execute()

    def read() -> None:
        while reply := client.xreadgroup("readers", "one", {stream: ">"}, count=size):
            client.xack(stream, "readers", *[id for id, _ in reply[0][1]])

    seconds = timed(write), timed(read)
    client.delete(stream)
    return seconds


def ours(streams: Streams, groups: list[Group], size: int) -> tuple[float, float]:
    """Seconds to publish the groups, and to read and acknowledge them, `size` a call."""
    topic = f"groups-{next(_names)}"
    reader = streams.reader(topic, Group, "bench")

    def write() -> None:
        for portion in portions(groups, size):
            streams.publish_many(topic, portion, seconds=60)

    def read() -> None:
        while entries := reader.read(size, 0):
            reader.acknowledge([entry.id for entry in entries])

    return timed(write), timed(read)


def measure(groups: list[Group], rounds: int, folder: Path) -> Times:
    """Seconds of every way to move the groups, one figure a round."""
    payloads = [encode_record(group) for group in groups]
    times: Times = {}
    on_files = connect(redis_context(folder / "files", "7-0", 1, a_config(backend="files", budget_bytes=BUDGET)))
    with (
        a_redis(folder / "redis", "7-0", a_config(budget_bytes=BUDGET)) as (context, _),
        connect(context) as on_redis,
        on_files,
        raw_client(context) as client,
        gated_client(context) as gated,
    ):
        for _, size in product(range(rounds), (1, BULK)):
            for way, seconds in (
                (PLAIN, plain(client, payloads, size)),
                (GATED, plain(gated, payloads, size)),
                (REDIS, ours(on_redis, groups, size)),
                ("streams, files", ours(on_files, groups, size)),
            ):
                for direction, value in zip(("publish", "read+ack"), seconds, strict=True):
                    times.setdefault((direction, size, way), []).append(value)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of the streams.")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    groups = [a_group(position) for position in range(given.groups)]
    size = len(encode_record(groups[0]))
    print(f"{given.groups} groups of {SAMPLES} samples of {TOKENS} tokens, {size} bytes each; median of {given.rounds}")
    with tempfile.TemporaryDirectory() as folder:
        medians = {way: statistics.median(found) for way, found in measure(groups, given.rounds, Path(folder)).items()}
    ratios = {key: [medians[*key[:2], way] / medians[key] for way in (PLAIN, GATED)] for key in medians}
    rows = []
    for key, seconds in sorted(medians.items(), key=lambda item: item[0][:2]):
        rate = given.groups / seconds
        rows.append((*key, rate, rate * SAMPLES, rate * size / 1e6, *ratios[key]))
    print(markdown(COLUMNS, rows))
    met = all(of_gated >= MIN_RATIO for (_, _, way), (_, of_gated) in ratios.items() if way == REDIS)
    aim = f"the streams on Redis have at least {MIN_RATIO:.0%} of the speed of plain commands through the gate"
    return judge(aim, met)


if __name__ == "__main__":
    sys.exit(main())
