"""How long handing over a version of the weights keeps the trainer from its next step, without any server.

    torchrun --nproc-per-node N -m tests.gpu.handover OUT.json [--shape 0.6b] [--device cuda] [--steps 12]

Steps alone and steps after each of which every rank copies its rows, in turn. In the place of a server, rank 0's bytes
are copied once more on a separate stream while the next step computes, as a server on the same GPU does. The result has
the median seconds of a step of each kind, their difference (the stall), and the host's seconds in a handover; and, as
`changed`, whether each version's bytes differ from those of the version before.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.inference.weight_sync.publication import SenderSettings
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.transports.gpu_group import SideStream
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from pipeline.train.controller.rank_publication import RankPublication
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.subprocesses import hold_port
from tests.gpu.cold_starts import gpu_name
from tests.gpu.speed import LOSS, OPTIM
from tests.gpu.workload import WORKLOADS, Workload

WARM_UP = 4


class Receiver:
    """Copies each version as a server on the same GPU does, beside the trainer's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._buffer = SideStream(device), torch.empty(0, dtype=torch.uint8)

    def receive(self, buffer: Tensor, ready: torch.cuda.Event | None) -> None:
        if self._buffer.shape != buffer.shape:
            self._buffer = torch.empty_like(buffer)
        with self._stream.begin(ready):
            self._buffer.copy_(buffer, non_blocking=True)

    def differs_from(self, buffer: Tensor) -> bool:
        """Whether the version that was received is another than this one."""
        return self._buffer.shape != buffer.shape or not torch.equal(self._buffer, buffer)


def measure(site: RankState, model: Path, load: Workload, steps: int, compiled: bool) -> dict[str, Any]:
    dispatch, device = RankGroup(site, Budget(load.budget)), torch.device(site.device)
    spec = ModelSpec("policy", ModelConfig(path=str(model), init="random", dtype="bfloat16"), OPTIM, compile=compiled)
    dispatch.init_model("policy", spec)
    data = dispatch.stage([load.make_batch()])[0]
    with hold_port() as holder:
        meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], "handover")
        publication = RankPublication(dispatch, "policy", SenderSettings(meeting, {}, site.device, on_host=False))
    receiver, taken = Receiver(device), {"step alone": list[float](), "step with handover": list[float]()}
    hosts, changed = list[float](), True
    for version in range(2 * (WARM_UP + steps)):
        kind = list(taken)[version % 2]
        began = time.perf_counter()
        dispatch.forward_backward("policy", data, LOSS)
        dispatch.optim_step("policy")
        if kind == "step with handover":
            handed = time.perf_counter()
            snapshot = publication.take(version, ())
            hosts.append(time.perf_counter() - handed)
            changed &= receiver.differs_from(snapshot.buffer) if version < 2 * WARM_UP else True
            receiver.receive(snapshot.buffer, snapshot.ready)
        taken[kind].append(time.perf_counter() - began)
    seconds = {kind: statistics.median(all_seconds[WARM_UP:]) for kind, all_seconds in taken.items()}
    stall = seconds["step with handover"] - seconds["step alone"]
    publication.close()
    return {
        "seconds": seconds,
        "stall_seconds": stall,
        "stall_fraction": stall / seconds["step with handover"],
        "host_seconds": statistics.median(hosts[WARM_UP:]),
        "tensors": len(publication.sources[0].layout.parameters),
        "bytes": publication.sources[0].layout.bytes,
        "changed": changed,
        "steps": taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=WORKLOADS, default="0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=12, help="of each kind")
    parser.add_argument("--length", type=int, default=0, help="tokens of each row; 0: ragged")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step, where they have one length")
    given = parser.parse_args()
    command = {name: value for name, value in vars(given).items() if name != "out"}
    with joined_world(given.device, Deadlines(operation=300, control=600, grace=5)) as site:
        if site.rank:
            site.serve()
            return
        with tempfile.TemporaryDirectory() as folder:
            load = WORKLOADS[given.shape]
            load.write_model(Path(folder))
            if given.length:
                load = load.of_length(given.rows, given.length, min(16, given.length - 1))
            result = measure(site, Path(folder), load, given.steps, compiled=given.device == "cuda")
            given.out.write_text(json.dumps({"command": command, "gpu": gpu_name()} | result, indent=1))
            print(json.dumps({name: value for name, value in result.items() if name != "steps"}, indent=1))
        RankGroup(site, Budget(1)).close()


if __name__ == "__main__":
    main()
