"""What offloading gives back, in bytes as the device counts them, and that what returns is what left.

    torchrun --nproc-per-node N -m tests.gpu.memory OUT.json [--shape 0.6b] [--device cuda]

A policy that has taken a step makes room for a second model, twice. Wrong bytes end the program with an error.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from pipeline.config import ModelConfig
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.device_release import release_device
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from pipeline.train.worker_spec import ModelSpec
from tests.gpu.speed import LOSS, OPTIM
from tests.gpu.workload import WORKLOADS, Workload


def held(site: RankState) -> int:
    """Bytes that this process holds of its device; on the CPU, resident."""
    if site.device == "cpu":
        return psutil.Process().memory_info().rss
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def free(site: RankState) -> int:
    """Bytes of the device that nobody holds."""
    if site.device == "cpu":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info()[0]


def figures(dispatch: RankGroup, what: str, seconds: float = 0.0) -> dict[str, Any]:
    dispatch.empty_cache()
    parts = {name: (memory.model, memory.optimizer) for name, memory in dispatch.memory()[0].items()}
    return {
        "when": what,
        "held": dispatch.run_on_all_models(held),
        "free": dispatch.run_on_all_models(free),
        "seconds": seconds,
        "parts_of_rank_0": parts,
    }


def lead(site: RankState, model: Path, load: Workload) -> list[dict[str, Any]]:
    dispatch, batch = RankGroup(site, Budget(load.budget), colocated=True), load.make_batch()
    spec = ModelSpec("policy", ModelConfig(path=str(model), init="random", dtype="bfloat16"), OPTIM)
    found = [figures(dispatch, "nothing yet")]
    dispatch.init_model("policy", spec)
    dispatch.forward_backward("policy", batch, LOSS)
    dispatch.optim_step("policy")
    found.append(figures(dispatch, "policy after a step"))
    before = dispatch.forward("policy", batch)
    for turn in ("first", "second"):
        begun = time.perf_counter()
        dispatch.offload_all()
        found.append(figures(dispatch, f"all away, {turn} time", time.perf_counter() - begun))
        begun = time.perf_counter()
        after = dispatch.forward("policy", batch)
        found.append(figures(dispatch, f"policy back for a forward pass, {turn} time", time.perf_counter() - begun))
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), "other numbers after offloading"
    dispatch.init_model("reference", ModelSpec("policy", spec.model))
    found.append(figures(dispatch, "reference on the device, policy away"))
    dispatch.forward_backward("policy", batch, LOSS)
    dispatch.optim_step("policy")
    found.append(figures(dispatch, "policy after a further step, reference away"))
    release_device(dispatch)  # which fails if more than libraries keep is held
    found.append(figures(dispatch, "released"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=WORKLOADS, default="0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args()
    with joined_world(given.device, Deadlines(operation=120, control=240, grace=5)) as site:
        if site.rank:
            site.serve()
            return
        with tempfile.TemporaryDirectory() as folder:
            WORKLOADS[given.shape].write_model(Path(folder))
            given.out.write_text(json.dumps(lead(site, Path(folder), WORKLOADS[given.shape]), indent=1))
        RankGroup(site, Budget(1)).close()


if __name__ == "__main__":
    main()
