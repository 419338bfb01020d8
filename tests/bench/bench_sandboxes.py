"""Sandboxes of the policy's code per second, and where the seconds of one go.

    python -m tests.bench.bench_sandboxes [--image DIRECTORY] [--seconds 8] [--json FILE]

Each kind that runs here (`task.sandbox.kind`) runs a program that prints its time, one and eight at a time. `start`:
from the call to the first line of the program. `run`: its own time, here that of one `print`. `removal`: from its end
to the end of the call. `CPU`: of all processes of one sandbox, except those that podman detaches. `none` is the cost of
Python itself.
"""

import argparse
import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import sandbox
from tests.bench.tables import markdown

PROGRAM = "import time; began = time.time(); print(end=''); print(began, time.time())"
MEMORY_BYTES = 1 << 28


def measure_one() -> tuple[float, float, float]:
    """Seconds of start, run and removal of one sandbox."""
    called = time.time()
    result = sandbox.run_python(PROGRAM, 60, MEMORY_BYTES)
    returned = time.time()
    if result.failed:
        raise RuntimeError(result.text)
    began, ended = map(float, result.output.split())
    return began - called, ended - began, returned - ended


def measure(concurrency: int, seconds: float) -> dict[str, Any]:
    """Sandboxes per second over some seconds, and the median seconds of each part."""
    measure_one()
    began, used = time.monotonic(), _cpu_seconds()

    def repeat() -> list[tuple[float, float, float]]:
        parts = []
        while time.monotonic() < began + seconds:
            parts.append(measure_one())
        return parts

    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(repeat) for _ in range(concurrency)]
        parts = [part for future in futures for part in future.result()]
    start, run, removal = (median(column) for column in zip(*parts, strict=True))
    rate = len(parts) / (time.monotonic() - began)
    cpu = (_cpu_seconds() - used) / len(parts)
    return {"per_second": rate, "start": start, "run": run, "removal": removal, "cpu": cpu, "sandboxes": len(parts)}


def _cpu_seconds() -> float:
    """CPU seconds of this process and of all children that ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="", help="an unpacked root directory with Python, for podman and apptainer")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="file for the raw numbers")
    arguments = parser.parse_args()
    choices = [SandboxConfig(kind="none"), SandboxConfig(), SandboxConfig(kind="bubblewrap")]
    if arguments.image:
        choices += [SandboxConfig(kind="podman", image=arguments.image)]
        choices += [SandboxConfig(kind="apptainer", image=arguments.image)]
    rows: list[dict[str, Any]] = []
    for chosen in choices:
        if why := sandbox.missing_sandbox(chosen):
            print(f"{chosen.kind} does not run here: {why}")
            continue
        sandbox.choose_sandbox(chosen)
        for concurrency in (1, 8):
            rows.append({"kind": chosen.kind, "concurrency": concurrency} | measure(concurrency, arguments.seconds))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    heads = ["kind", "at a time", "sandboxes/s", "start s", "run s", "removal s", "CPU s", "sandboxes"]
    print(markdown(heads, [list(row.values()) for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
