"""Step seconds, memory and bytes of collectives with replicas of a model (HSDP) and with one that is sharded (FSDP).

    torchrun --nproc-per-node 4 -m tests.gpu.replicas OUT.json [--shape 1.7b] [--replicas 1 2] [--steps 6] [--reshard]

Whole steps of compiled workers that recompute nothing, on the ragged rows of the workload. Rows of a step are the same
with any number of replicas, so losses are equal beyond rounding. Bytes are those that one rank gives to each kind of
collective in one step, by the group's size, as the profiler records them. `--device cpu --shape tiny` needs no GPU.
Exits with 1 if the losses differ.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.train.batching.packing import Budget
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from tests.gpu.speed import SAME_LOSS, WAYS, Task, measure, the_worker
from tests.gpu.workload import WORKLOADS

WAY = "worker, compiled, rows staged"
DTYPES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
"""Bytes of an element, by the names that the profiler's trace has for types."""


def trace_collectives(step: Callable[[], object]) -> dict[str, int]:
    """Bytes that this rank gave to each collective of a step, such as "allreduce of 2": from the profiler's trace."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    given = defaultdict[str, int](int)
    for event in events:
        values = event.get("args", {})
        if event.get("name") == "record_param_comms" and int(values.get("In msg nelems", 0)):
            kind = f"{values['Collective name']} of {values['Group size']}"
            given[kind] += int(values["In msg nelems"]) * DTYPES.get(values["dtype"], 0)
    return dict(given)


def measure_replicas(task: Task, replicas: int, reshard: bool) -> dict[str, Any]:
    """Controller: what steps cost with so many replicas."""
    way = replace(WAYS[WAY], compile=task.site.device == "cuda", reshard=reshard, replicas=replicas)
    found: dict[str, Any] = measure(task, way)
    with the_worker(task, way) as (step, _):
        step()
        return found | {"collective_bytes": trace_collectives(step)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """One line for each number of replicas, and one for each of its collectives."""
    lines = [f"{'':24s} {'s/step':>8s} {'tokens/s':>9s} {'MFU':>6s} {'peak GiB':>8s} {'first loss':>10s}"]
    for name, each in found.items():
        if "error" in each:
            lines.append(f"{name:24s} {each['error']}")
            continue
        numbers = f"{each['step_seconds']:8.3f} {each['tokens_per_second']:9,.0f} {each['mfu']:6.3f}"
        lines.append(f"{name:24s} {numbers} {each['peak_bytes'] / 2**30:8.1f} {each['losses'][0]:10.5f}")
        lines += [f"    {kind:40s} {size / 2**20:9,.0f} MiB" for kind, size in each["collective_bytes"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=WORKLOADS, default="1.7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--replicas", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--reshard", action="store_true")
    given = parser.parse_args()
    found = dict[str, dict[str, Any]]()
    with joined_world(given.device, Deadlines(operation=300, control=600, grace=5)) as site:
        if site.rank:
            site.serve()
            return 0
        with tempfile.TemporaryDirectory() as folder:
            load = WORKLOADS[given.shape]
            load.write_model(Path(folder))
            task = Task(site, Path(folder), load, torch.device(given.device), given.steps)
            for replicas in given.replicas:
                found[name_of(site, replicas)] = measure_replicas(task, replicas, given.reshard)
                given.out.write_text(json.dumps(found, indent=1))
        RankGroup(site, Budget(1)).close()
    print(table(found))
    losses = [each["losses"][0] for each in found.values()]
    return int(max(losses) - min(losses) > SAME_LOSS)


def name_of(site: RankState, replicas: int) -> str:
    shards = site.ranks // replicas
    return f"HSDP {replicas} x {shards}" if replicas > 1 else f"FSDP {shards}"


if __name__ == "__main__":
    raise SystemExit(main())
