"""What a publication of weights takes: memory of each trainer rank beyond its shard, time, and bytes a second.

    python -m tests.bench.bench_publication [--ranks 1 2 4] [--tensor 1 2] [--experts 32] [--updates 5]

Makes a model of some 300 MB in bfloat16 in a temporary folder (`--experts`: a mixture of that many experts in each
layer), then a world of each size, which publishes over gloo to a stand-in for a server of each number of processes: the
same routes and groups as vLLM's, without a model. Prints for each world the most private memory of each rank (MiB,
`RssAnon` read every 2 ms) beyond its float32 shard, at the first version and at later ones; and of the later ones the
median milliseconds that `start` holds up the trainer, those until the server has the version, and the GB/s that the
server's processes receive meanwhile. Exits with 1 if a rank takes more than its part of a version, one chunk
(`WEIGHT_CHUNK`, 128 MiB) and a tenth of the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from pipeline.config import InferenceConfig
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.topology.memory_budget import WEIGHT_CHUNK
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.utils.subprocesses import hold_port
from tests.bench.bench_loading import MIB, init, make_model, watched
from tests.bench.tables import judge, markdown
from tests.fakes.http_server import PASSWORD

COLUMNS = ("ranks", "tensor", "rank", "shard", "first, beyond", "later, beyond", "start ms", "update ms", "GB/s")
MODEL_MIB = 300
SERVER = """
import sys
from tests.fakes.weight_server import WeightServer
with WeightServer("127.0.0.5", int(sys.argv[1])) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""
Row = tuple[int, float, float, float, float, float, float]


def measure(dispatch: RankGroup, model: Path, server: str, processes: int, updates: int) -> list[Row]:
    """A row for each rank."""
    init(dispatch, model.parent / "tiny", "random", "bfloat16")
    dispatch.remove_model("policy")
    none: list[int] = []
    with watched(dispatch, none):
        pass
    init(dispatch, model, "random", "bfloat16")
    first, later, starts, wholes = list[int](), list[int](), list[float](), list[float]()
    with hold_port() as holder:
        meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], PASSWORD)
        with WeightSender([server], meeting, InferenceConfig(), 60.0, lambda server, version: None) as sender:
            publisher = WeightPublisher(dispatch, sender, lambda: None)
            with watched(dispatch, first):
                publisher.start(0)
                publisher.wait_until_synced()
            with watched(dispatch, later):
                for version in range(1, updates + 1):
                    began = time.monotonic()
                    publisher.start(version)
                    starts.append(1000 * (time.monotonic() - began))
                    publisher.wait_until_synced()
                    wholes.append(1000 * (time.monotonic() - began))
    size = dispatch.layout("policy").bytes
    start, whole = statistics.median(starts), statistics.median(wholes)
    rows: list[Row] = []
    for rank, memory in enumerate(dispatch.memory()):
        shard = memory["policy"].model
        beyond = [(most[rank] - none[rank] - shard) / MIB for most in (first, later)]
        rows.append((rank, shard / MIB, beyond[0], beyond[1], start, whole, size / whole / 1e6))
    return rows


def rank_main(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()

    def lead(dispatch: RankGroup) -> None:
        command = [sys.executable, "-c", SERVER, str(given.tensor[0])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            rows = measure(dispatch, given.model, endpoint, given.tensor[0], given.updates)
            given.out.write_text(json.dumps(rows))

    run_controller_or_worker(lead, Budget(4096))


def world(ranks: int, processes: int, folder: Path, updates: int) -> list[Row]:
    """What torchrun's ranks measure."""
    out = folder / f"{ranks}-{processes}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own = ["-m", "tests.bench.bench_publication", "--model", str(folder / "model"), "--out", str(out)]
    own += ["--tensor", str(processes), "--updates", str(updates)]
    subprocess.run([sys.executable, *launcher, *own], check=True, timeout=300)
    rows: list[Row] = json.loads(out.read_text())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model:
        rank_main(given)
        return 0
    table = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", experts=given.experts)
        make_model(Path(folder) / "tiny", size=64, layers=1, experts=given.experts)
        for ranks in given.ranks:
            for processes in given.tensor:
                rows = world(ranks, processes, Path(folder), given.updates)
                table += [(ranks, processes, *row) for row in rows]
    print(markdown(COLUMNS, table))
    bound = WEIGHT_CHUNK / MIB + MODEL_MIB / 10
    fits = all(max(row[4], row[5]) <= MODEL_MIB / row[0] + bound for row in table)
    return judge("a rank's part of a version, one chunk, and a tenth of the model", fits)


if __name__ == "__main__":
    sys.exit(main())
