"""Steps of small models: this trainer beside the plain compiled loop, with a profile of each, on one GPU.

    python -m tests.gpu.small_steps OUT [--cases 135m-ragged …] [--seconds 540] [--device cuda]

Each case is `tests.gpu.speed` in a process of its own with a time limit (`--patience`), so that one that hangs costs no
other. OUT/small-steps.json is written after each case: step seconds, tokens/s, MFU, and by phase launches, milliseconds
of the GPU and of the host. None begins that the rest of `--seconds` does not hold. `--device cpu --cases tiny` needs no
GPU.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tests.gpu import children

WAYS = ("plain loop, compiled", "worker, compiled, rows staged", "worker, compiled")
EAGER = ("plain loop, eager", "worker, eager")
"""On a CPU, where the compiler takes minutes."""
CASES = {
    "135m-ragged": ["--shape", "135m", "--small"],
    "0.6b-ragged": ["--shape", "0.6b", "--small"],
    "1.7b-ragged": ["--shape", "1.7b", "--small"],
    "135m-one-length": ["--shape", "135m", "--rows", "256", "--length", "64"],
    "1.7b-528": ["--shape", "1.7b", "--rows", "64", "--length", "528"],
    "0.6b-528": ["--shape", "0.6b", "--rows", "128", "--length", "528"],
    "tiny": ["--shape", "tiny", "--rows", "4", "--length", "32"],
}
"""Options of `tests.gpu.speed`, the most wanted first."""
LEAST_SECONDS = 45.0


def time_case(name: str, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The figures of each way, as far as they came within the limit."""
    out = given.out / f"{name}.json"
    options = ["--device", given.device, "--steps", str(given.steps), "--profile"]
    options += ["--ways", *(WAYS if given.device == "cuda" else EAGER)]
    with (given.out / f"{name}.log").open("w") as log:
        code = children.call(children.torchrun(1, "tests.gpu.speed", str(out), *CASES[name], *options), seconds, log)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found | ({"error": f"exit code {code} within {seconds:.0f} s"} if code else {})


def table(found: dict[str, dict[str, Any]]) -> str:
    """A line for each case and way."""
    lines = [f"{'':48s} {'ms/step':>8s} {'of plain':>8s} {'MFU':>6s} {'GPU busy':>8s} {'launches':>8s} {'waits':>6s}"]
    for case, ways in found.items():
        plain = ways.get(WAYS[0], ways.get(EAGER[0], {})).get("step_seconds", 0.0)
        for name in filter(ways.__contains__, (*WAYS, *EAGER)):
            way, title = ways[name], f"{case}, {name}"
            if "error" in way:
                lines.append(f"{title:48s} {way['error'].strip().splitlines()[-1][:120]}")
                continue
            seconds, traced = way["step_seconds"], way["profile"]
            numbers = f"{1e3 * seconds:8.1f} {plain / seconds:8.2f} {way['mfu']:6.3f} {traced['gpu_busy']:8.2f}"
            lines.append(f"{title:48s} {numbers} {traced['launches']:8.0f} {traced['waits']:6.0f}")
        if "error" in ways:
            lines.append(f"{case:48s} {ways['error']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for one case")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    begun, found = time.perf_counter(), dict[str, dict[str, Any]]()
    for name in given.cases:
        left = given.seconds - (time.perf_counter() - begun)
        enough = left > LEAST_SECONDS
        found[name] = time_case(name, given, min(given.patience, left)) if enough else {"error": "not begun: no time"}
        (given.out / "small-steps.json").write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
