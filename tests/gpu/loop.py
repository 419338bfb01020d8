"""The whole loop on the GPUs of this machine, and its two halves alone: how much of the slower one is left.

    python -m tests.gpu.loop OUT.json [--shape 0.6b] [--trainers 1] [--servers 1] [--steps 40] [--lag 4] [--ceilings] …

The work: 16-token prompts, 8 samples a prompt, 128 samples a step, completions of 512 tokens, one update a step; with
`--ends 64`, of 500 on average and 2,048 at most (`--tokens 2048`), in a geometric distribution. The run is what a user
starts, `launchers/submit.py cluster=local`; its rate is taken over the steps after the first ten.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from pipeline.observability.run_history import attempt_names, read_attempt
from pipeline.run.fault_moments import FaultRecord
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from tests.gpu import children
from tests.gpu.ceilings import EXPERT_PARALLEL, PROMPT, Halves, measure
from tests.gpu.pulse import pulse
from tests.gpu.words import write_model, write_whole_model
from tests.gpu.workload import WORKLOADS

SAMPLES, PROMPTS = 8, 16
PRECISION = ("mismatch", "mismatch_kl", "skipped", "overflows", "loss_scale")
"""What a step's metrics say of its compute type."""
SETTLED = 10
"""Steps until caches are warm and everything is compiled."""
END_SECONDS = 120.0
"""For a run that is told to end."""
LOOK_SECONDS = 5.0
"""Between two looks at how much memory the run's processes hold."""
ENVIRONMENT = {**os.environ, "HYDRA_FULL_ERROR": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = asked_for(arguments)
    result: dict[str, Any] = {"command": asked(chosen)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write = write_whole_model if chosen.adapter else write_model
        write(root / "model", WORKLOADS[chosen.shape], chosen.ends)
        if chosen.ceilings:
            result["alone"] = measure(halves(chosen), root / "model")
            print(json.dumps(result["alone"]), flush=True)
        began = time.time()

        def note(ran: dict[str, Any]) -> dict[str, Any]:
            """The result's file, as far as the run has come; what it says, less what is long."""
            rows = rows_of(root / "runs" / "loop" / "metrics.jsonl")
            roles = {"starts": starts_of(root / "runs" / "loop", began)}
            whole = with_efficiency(result | ran | rates(rows, began) | roles)
            beside = chosen.out.with_suffix(".part")
            beside.write_text(json.dumps(whole | {"rows": rows}, indent=1))
            beside.replace(chosen.out)
            return {name: value for name, value in whole.items() if name != "pulse"}

        ran = run(root, chosen, stepped=note)  # whatever ends this process, what was measured is safe
        if chosen.logs:
            logs = logs_of(root / "runs" / "loop")
            chosen.logs.write_text("".join(f"--- {name}\n{text}\n" for name, text in logs.items()))
        said = note(ran | {"gpu_mib_left": memory_left()})
    print(json.dumps(said, indent=1))
    return int(said["exit"])


def asked_for(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="processes that spread experts, on each side")
    parser.add_argument("--per-gpu", type=int, default=1, help="servers that share one GPU")
    parser.add_argument("--adapter", type=int, default=0, help="train adapters of this rank on a frozen base")
    parser.add_argument("--share", action="store_true", help="servers on the trainer's GPUs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ends", type=int, default=1, help="token ids that end a completion")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--api", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=64, help="groups in flight")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--ceilings", type=float, default=0.0, help="seconds for which the halves alone are measured")
    parser.add_argument("--faults", nargs="+", default=[], help="planned faults, such as kill:inference[0]@step=12")
    parser.add_argument("--logs", type=Path, help="file for all logs of the run")
    parser.add_argument("overrides", nargs="*", help="further keys of the run's config")
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.adapter and chosen.ceilings:
        parser.error("--ceilings are of whole models: leave out --adapter or --ceilings")
    return chosen


def with_efficiency(result: dict[str, Any]) -> dict[str, Any]:
    """A result with what the loop reaches of its slower half, if both were measured."""
    if not result.get("alone") or "samples_per_second" not in result:
        return result
    lower = min(result["alone"][name] for name in ("generation_samples_per_second", "training_samples_per_second"))
    return result | {"efficiency": result["samples_per_second"] / lower}


def halves(chosen: argparse.Namespace) -> Halves:
    """The same work for each half alone."""
    going_on = 1 - chosen.ends / WORKLOADS[chosen.shape].model["vocab_size"]
    mean = float(chosen.tokens) if chosen.ends == 1 else (1 - going_on**chosen.tokens) / (1 - going_on)
    return Halves(
        shape=chosen.shape,
        trainers=chosen.trainers,
        servers=chosen.servers,
        tensor=chosen.tensor,
        per_gpu=chosen.per_gpu,
        api=chosen.api,
        tokens=chosen.tokens,
        ends=chosen.ends,
        mean=mean,
        samples=SAMPLES * PROMPTS,
        group=SAMPLES,
        concurrency=SAMPLES * chosen.concurrency,
        seconds=chosen.ceilings,
        ep=chosen.ep,
    )


def memory_left() -> list[int]:
    """MiB that are held on each GPU of the machine; empty without any."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [int(line) for line in subprocess.check_output(query, text=True, timeout=60).split()]
    except OSError:
        return []


def asked(chosen: argparse.Namespace) -> dict[str, Any]:
    """The arguments but the places of what it writes."""
    return {name: value for name, value in vars(chosen).items() if name not in ("out", "logs")}


def run(root: Path, chosen: argparse.Namespace, stepped: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The run's exit code, how long it took, and the most host memory that its processes held.

    `stepped` gets the same whenever there are new steps, without an exit code yet. Of a run that fails the ends of its
    logs are printed.
    """
    command = [sys.executable, "launchers/submit.py", *overrides(root, chosen)]
    started, peak, own = time.monotonic(), dict[str, int](), os.getpid()
    code: int | None = None
    told = 0

    def found() -> dict[str, Any]:
        return {
            "exit": code,
            "struck": struck_in(RunPaths(root / "runs" / "loop")),
            "seconds": time.monotonic() - started,
            "host_gib": {name: held / 2**30 for name, held in peak.items()},
            "pulse": taken.beats,
        }

    submitted = children.started(command, environment=ENVIRONMENT, end_seconds=END_SECONDS)
    with pulse(own) as taken, submitted as process:
        while code is None and time.monotonic() - started < chosen.seconds:
            code = children.wait(process, LOOK_SECONDS)
            for name, held in memory_of(own).items():
                peak[name] = max(peak.get(name, 0), held)
            done = steps_done(root)
            if done > told:
                stepped(found())
                told = done
        if code is None:
            code = children.end(process, END_SECONDS) or children.OUT_OF_TIME
    if code:
        tails = {name: "\n".join(log.splitlines()[-25:]) for name, log in logs_of(root / "runs" / "loop").items()}
        print(*(f"--- {name}\n{tail}" for name, tail in tails.items()), sep="\n")
    return found()


def steps_done(root: Path) -> int:
    """The last step that was trained."""
    return max((row["step"] for row in trained(root)), default=0)


def struck_in(run: RunPaths) -> list[dict[str, Any]]:
    """The planned faults that have happened in the run, in order of time."""
    read = (shared_files.read_document(file, FaultRecord) for file in run.faults.glob("*.json"))
    records = sorted((record for record in read if record is not None), key=lambda record: record.time)
    return [{"fault": record.fault, "time": record.time} for record in records]


def memory_of(pid: int) -> dict[str, int]:
    """Bytes that the run's processes hold for themselves (PSS), by role; vLLM's count as the server's."""
    held: dict[str, int] = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            name = next((role for role in ("trainer", "actor", "redis", "vllm", "VLLM") if role in words), "other")
            held[name.lower()] = held.get(name.lower(), 0) + process.memory_full_info().pss
        except psutil.Error:
            continue  # it has just ended
    return held | {"all": sum(held.values())}


def overrides(root: Path, chosen: argparse.Namespace) -> list[str]:
    """The run, as keys of the config."""
    serving = -(-chosen.servers // chosen.per_gpu) * chosen.tensor
    gpus = chosen.trainers + (0 if chosen.share else serving)
    on_gpus = [
        "resources.device=cuda",
        f"resources.gpus_per_node={gpus}",
        "resources.trainer.gpus=1",
        f"resources.inference.gpus={chosen.tensor}",
        f"resources.inference.servers_per_gpu={chosen.per_gpu}",
        *(("resources.colocate=true", "inference.gpu_memory=0.4") if chosen.share else ()),
        "model.dtype=bfloat16",
        "training.compile=true",
        *((f"inference.extra_args=[{','.join(EXPERT_PARALLEL)}]",) if chosen.ep > 1 else ()),
    ]
    longest = WORKLOADS[chosen.shape].model["max_position_embeddings"]
    return [
        "name=loop",
        f"output={root / 'runs'}",
        f"model.path={root / 'model'}",
        "model.init=random",
        f"model.max_length={min(chosen.tokens + PROMPT + 48, longest)}",
        "task.name=tests.gpu.words:Words",
        f"training.steps={chosen.steps}",
        f"training.prompts_per_step={PROMPTS}",
        f"training.max_lag={chosen.lag}",
        "training.eval_every=0",
        f"training.checkpoint_every={10 if any(':trainer@' in fault for fault in chosen.faults) else 100_000}",
        f"faults=[{','.join(chosen.faults)}]",
        "optim.lr=1e-5",
        f"rollout.group_size={SAMPLES}",
        f"rollout.max_tokens={chosen.tokens}",
        f"rollout.concurrency={chosen.concurrency}",
        *(("model.init=pretrained", f"model.lora.rank={chosen.adapter}") if chosen.adapter else ()),
        "inference.max_sequences=512",
        f"inference.api_server_count={chosen.api}",
        "cluster.startup_seconds=400",
        "resources.services.nodes=0",
        f"resources.trainer.processes={chosen.trainers}",
        "resources.inference.nodes=1",
        f"resources.inference.servers={chosen.servers}",
        "tracking=none",
        *((f"training.mesh.ep={chosen.ep}",) if chosen.ep > 1 else ()),
        *(on_gpus if chosen.device == "cuda" else []),
        *chosen.overrides,
    ]


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def trained(root: Path) -> list[dict[str, Any]]:
    """The rows of the steps of the run."""
    return [row for row in rows_of(root / "runs" / "loop" / "metrics.jsonl") if row["kind"] == "train"]


def rates(rows: Sequence[dict[str, Any]], began: float) -> dict[str, float]:
    """Samples a second over the settled steps, from the time of each row, and medians of what the trainer says."""
    train = [row for row in rows if row["kind"] == "train" and row["job"] == "rl"]
    settled = train[SETTLED:]
    if len(settled) < 2:
        return {}
    seconds = settled[-1]["time"] - settled[0]["time"]
    found = {
        "start_seconds": train[0]["time"] - train[0]["seconds/step"] - began,
        "first_step_seconds": train[0]["seconds/step"],
        "samples_per_second": (len(settled) - 1) * PROMPTS * SAMPLES / seconds,
        "first_reward": train[0]["reward/mean"],
        "last_reward": train[-1]["reward/mean"],
    }
    measured = (name for name, value in settled[-1].items() if isinstance(value, int | float))
    names = [name for name in measured if "/" in name or name in PRECISION]
    return found | {name: statistics.median(row[name] for row in settled if name in row) for name in names}


def starts_of(run: Path, began: float) -> dict[str, dict[str, float]]:
    """Seconds from `began` until each role of the first attempt was started and was ready: of a server, between the two
    lies vLLM's own start."""
    found: dict[str, dict[str, float]] = {}
    paths = RunPaths(run)
    for name in attempt_names(paths)[:1]:
        for change in read_attempt(paths.attempt("", name)).transitions:
            if change.state in ("starting", "ready"):
                found.setdefault(change.role, {}).setdefault(change.state, change.time - began)
    return found


def logs_of(run: Path) -> dict[str, str]:
    """Each log of a run's processes, by attempt and name."""
    return {
        f"{log.parent.parent.name} {log.name}": log.read_text(errors="replace")
        for log in sorted(run.glob("attempts/*/logs/*"))
    }


if __name__ == "__main__":
    raise SystemExit(main())
