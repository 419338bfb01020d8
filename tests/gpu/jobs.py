"""Jobs on packed rows on the devices of this machine, as the trainer of a run of `launchers/train.py` does them.

A queue of one job of SFT and one of RL, through `pipeline.train.offline.job_execution` under torchrun: nccl, commits,
exports, and the check that nothing is left on the devices, without which no job is announced.

    python -m torch.distributed.run --standalone -m tests.gpu.jobs <folder of jobs> <config as JSON>
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from pipeline.config import RunConfig, load_config
from pipeline.train.controller.lead_or_serve import run_role_of_rank
from pipeline.train.offline.job_execution import run_job_files
from pipeline.train.offline.packed_dataset import write_packed
from tests.fakes.configs import make_config
from tests.gpu.workload import Workload

STEPS = 3
GROUP = 4
"""Rows of a prompt."""


def write_queue(folder: Path, load: Workload) -> None:
    """A model, and the jobs `1-sft.json` and `2-rl.json` in `queue/` with their rows beside it."""
    (folder / "queue").mkdir()
    batch = load.make_batch()
    rows = [replace(row, prompt=index // GROUP) for index, row in enumerate(batch.rows)]
    prompts = load.rows // GROUP
    load.write_model(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")  # something in its place: nothing is said in words
    for name, kind, portion in (("1-sft", "sft", {"batch": load.rows}), ("2-rl", "rl", {"prompts": prompts})):
        write_packed(folder / f"{name}-rows", rows, load.model["vocab_size"])
        tree = {
            "kind": kind,
            "version": 1,
            "inputs": {"kind": "packed", "folder": f"../{name}-rows"},
            "optimizer_state": f"../{kind}-state",
            "output": f"../{name}-model",
            "log": f"../{name}.jsonl",
            "schedule": {"steps": STEPS, **portion, "optim": {"lr": 1e-6}},
        }
        (folder / "queue" / f"{name}.json").write_text(json.dumps(tree))


def config_of(folder: Path, load: Workload, device: str, ranks: int) -> RunConfig:
    """How the jobs are done."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    return make_config(
        model={"path": str(folder / "model"), "init": "random", "dtype": dtype, "max_length": load.longest},
        training={"steps": STEPS, "prompts_per_step": load.rows, "micro_batch_tokens": load.budget},
        resources={"device": device, "trainer": {"processes": ranks, "gpus": int(device == "cuda")}},
    )


def look_at(folder: Path) -> list[dict[str, Any]]:
    """What became of each job: its events, its speed and MFU, and whether its model loads and its rows are gone."""
    found = []
    for log in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [line for line in lines if line["event"] == "step"]
        finished = lines[-1]["event"] == "finished"
        loaded = finished and AutoModelForCausalLM.from_pretrained(folder / f"{log.stem}-model").num_parameters() > 0
        found.append(
            {
                "job": log.stem,
                "events": [line["event"] for line in lines],
                "error": lines[-1].get("error", ""),
                "last_step": steps[-1] if steps else {},
                "model_loads": loaded,
                "rows_left": (folder / f"{log.stem}-rows").exists(),
            }
        )
    return found


def main(arguments: list[str]) -> None:
    """One process of torchrun."""
    config = load_config(json.loads(arguments[1]))
    run_role_of_rank(config, "secret", lambda dispatch: run_job_files(Path(arguments[0]), dispatch, config))


if __name__ == "__main__":
    main(sys.argv[1:])
