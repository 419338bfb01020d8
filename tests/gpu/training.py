"""Everything that is shown of the training core on GPUs, by one command.

    python -m tests.gpu.training --ranks N --out DIR [--device cpu --shape tiny] [--parts …] [--seconds 900]

Needs torch, transformers, pydantic, msgspec, psutil and numpy; cases with adapters are left out where there is no peft.
Parts run one after the other, each in a torchrun world of its own: the oracle in float32, the speed, the oracle in
bf16, the memory, jobs on packed rows, the oracle with compiled layers. On the CPU nothing is compiled before.

Each part's figures lie in DIR as JSON as soon as it has them, beside its log; one that fails, or for which there is no
time left, does not keep the others from running. Exit code 1 unless all parts passed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.tables import markdown
from tests.gpu import children
from tests.gpu.jobs import config_of, look_at, write_queue
from tests.gpu.speed import SAME_LOSS, WAYS
from tests.gpu.workload import WORKLOADS
from tests.support.oracle.cases import write_models
from tests.support.oracle.truth import CUDA_FLOAT32, Errors, errors, excess, loose_bounds
from tests.support.oracle.ways import MUTATIONS, Case, Dtype, Result, mutations
from tests.support.ranks.training_ranks import read_results

Outcome = tuple[bool, Any]


@dataclass(frozen=True)
class Run:
    """What was asked for."""

    ranks: int
    out: Path
    device: str
    shape: str
    parts: tuple[str, ...]
    ends: float

    def torchrun(self, name: str, module: str, *arguments: str, most: float) -> str:
        """Run a module in a world of its own; "" or what went wrong. Nothing of it goes on when its time is over."""
        seconds = min(most, self.ends - time.monotonic())
        if seconds < 1:
            return "no time left"
        with (self.out / f"{name}.log").open("wb") as log:
            code = children.call(children.torchrun(self.ranks, module, *arguments), seconds, log)
        if code == children.OUT_OF_TIME:
            return f"not done after {seconds:.0f} s"
        return "" if code == 0 else f"exit code {code}, see {name}.log"


def oracle(run: Run, name: str, dtype: Dtype, choice: str, most: float) -> Outcome:
    """The cases of `test_training_oracle` on this device, with the errors of each."""
    with tempfile.TemporaryDirectory() as folder:
        models, results = Path(folder), Path(folder) / "results"
        write_models(models)
        arguments = (str(models), str(results), "--cases", choice, "--device", run.device, "--dtype", dtype)
        trouble = run.torchrun(name, "tests.support.ranks.training_ranks", *arguments, most=most)
        table, mutated = [], mutations(dtype)
        for key, result in read_results(results).items() if results.exists() else ():
            case = key if isinstance(key, Case) else mutated[key]  # type: ignore[index]
            found = errors(result, case.model(models), case.recipe, case.aux, case.replayed)
            bounds = CUDA_FLOAT32 if dtype == "float32" else loose_bounds(case.recipe, dtype)
            wrong = excess(found, bounds)
            right = not wrong and uses_kernel(case, result, run.device)
            good = right if isinstance(key, Case) else bool(wrong) and result.seen["mutated"] > 0
            table.append({"case": str(key), "good": good, "errors": found, "beyond": wrong, "seen": result.seen})
    bad = [row["case"] for row in table if not row["good"]]
    return not trouble and not bad and bool(table), {"trouble": trouble, "bad": bad, "cases": table}


def uses_kernel(case: Case, result: Result, device: str) -> bool:
    """Whether packed rows went through `varlen_attn` where they should: on CUDA in 16 bits."""
    expected = device == "cuda" and case.dtype != "float32" and case.packed
    return case.compile or (result.seen.get("kernel", 0) > 0) == expected


def report_oracle(found: Any) -> str:
    """The worst error of each kind over all right cases, and which one it was."""
    cases = [row for row in found["cases"] if row["case"] not in MUTATIONS]
    mutated = [row for row in found["cases"] if row["case"] in MUTATIONS]
    lines = [f"{len(cases)} cases, {len(mutated)} mutations; wrong: {', '.join(found['bad']) or 'none'}"]
    kinds: Errors = cases[0]["errors"] if cases else {}
    worst = {kind: max(cases, key=lambda row, kind=kind: row["errors"][kind]) for kind in kinds}
    rows = [(kind, f"{row['errors'][kind]:.1e}", row["case"]) for kind, row in worst.items()]
    return "\n\n".join([*lines, markdown(("error", "worst", "in"), rows)]) if rows else lines[0]


def speed(run: Run) -> Outcome:
    file = run.out / "speed.json"
    chosen = [name for name, way in WAYS.items() if run.device == "cuda" or not way.compile]
    arguments = (str(file), "--shape", run.shape, "--device", run.device, "--ways", *chosen)
    trouble = run.torchrun("speed", "tests.gpu.speed", *arguments, most=280)
    ways = json.loads(file.read_text()) if file.exists() else {}
    trouble = trouble or disagreement(ways)
    good = not trouble and all("error" not in ways.get(name, {"error": ""}) for name in chosen)
    return good, {"trouble": trouble, "ways": ways}


def disagreement(ways: dict[str, Any]) -> str:
    """Ways that compute another loss than the first are faster or slower for nothing: "" or which."""
    losses = {name: way["losses"][0] for name, way in ways.items() if "losses" in way}
    first = next(iter(losses.values()), 0.0)
    off = [f"{name} {loss:.4f}" for name, loss in losses.items() if not abs(loss - first) <= SAME_LOSS]
    return f"the first loss is {first:.4f}, but: {', '.join(off)}" if off else ""


def report_speed(found: Any) -> str:
    columns = ("way", "s a step", "tokens/s", "MFU", "peak GiB", "first step s")
    rows = []
    for name, way in found["ways"].items():
        if "error" in way:
            rows.append((name, way["error"].strip().splitlines()[-1][:80], "", "", "", ""))
        else:
            memory, first = way["peak_bytes"] / 2**30, way["first_step_seconds"]
            rows.append((name, way["step_seconds"], way["tokens_per_second"], way["mfu"], memory, first))
    return markdown(columns, rows) if rows else ""


def memory(run: Run) -> Outcome:
    file = run.out / "memory.json"
    trouble = run.torchrun(
        "memory", "tests.gpu.memory", str(file), "--shape", run.shape, "--device", run.device, most=90
    )
    return not trouble, {"trouble": trouble, "figures": json.loads(file.read_text()) if file.exists() else []}


def report_memory(found: Any) -> str:
    rows = [(f["when"], f["held"][0] / 2**20, f["free"][0] / 2**20, f["seconds"]) for f in found["figures"]]
    return markdown(("when", "held MiB (rank 0)", "free MiB", "s"), rows) if rows else ""


def jobs(run: Run) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder, load = Path(name), WORKLOADS[run.shape]
        write_queue(folder, load)
        config = config_of(folder, load, run.device, run.ranks).model_dump_json()
        trouble = run.torchrun("jobs", "tests.gpu.jobs", str(folder / "queue"), config, most=120)
        found = look_at(folder)
    good = [job["model_loads"] and not job["rows_left"] for job in found]
    return not trouble and good == [True, True], {"trouble": trouble, "jobs": found}


def report_jobs(found: Any) -> str:
    rows = []
    for job in found["jobs"]:
        numbers = (job["last_step"].get(key, "") for key in ("tokens_per_second", "mfu"))
        rows.append((job["job"], ", ".join(dict.fromkeys(job["events"])), *numbers, job["error"][:80]))
    return markdown(("job", "events", "tokens/s", "MFU", "error"), rows) if rows else ""


PARTS: dict[str, tuple[Callable[[Run], Outcome], Callable[[Any], str]]] = {
    "oracle_float32": (lambda run: oracle(run, "oracle_float32", "float32", "some", 100), report_oracle),
    "speed": (speed, report_speed),
    "oracle_bfloat16": (lambda run: oracle(run, "oracle_bfloat16", "bfloat16", "some", 100), report_oracle),
    "oracle_float16": (lambda run: oracle(run, "oracle_float16", "float16", "some", 100), report_oracle),
    "memory": (memory, report_memory),
    "jobs": (jobs, report_jobs),
    "oracle_compiled": (lambda run: oracle(run, "oracle_compiled", "float32", "few_compiled", 300), report_oracle),
}
EXTRA = ("oracle_float16",)
"""Parts that only `--parts` starts: CPUs need long for float16."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=WORKLOADS, default="0.6b")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[name for name in PARTS if name not in EXTRA])
    parser.add_argument("--seconds", type=float, default=900, help="after which no part goes on")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.seconds
    run = Run(given.ranks, given.out, given.device, given.shape, tuple(given.parts), ends)
    passed = [run_part(run, name) for name in run.parts]
    return 0 if all(passed) else 1


def run_part(run: Run, name: str) -> bool:
    part, report = PARTS[name]
    begun = time.monotonic()
    good, found = part(run)
    seconds = time.monotonic() - begun
    (run.out / f"{name}.json").write_text(json.dumps({"passed": good, "seconds": seconds, **found}, indent=1))
    print(f"## {name}: {'passed' if good else 'FAILED'} on {run.ranks} × {run.device} in {seconds:.0f} s\n", flush=True)
    print("\n\n".join(text for text in (found["trouble"], report(found)) if text), flush=True)
    print(flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
