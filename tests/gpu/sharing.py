"""What a step on a GPU saves by computing once what the samples of a prompt begin with (`training.share_prefixes`).

    python -m tests.gpu.sharing OUT.json [--shape 0.6b] [--cases 512+512 1024+256] [--device cuda]

A step trains 128 samples, 8 of each prompt, for each case of tokens of a prompt and of a completion, with compiled
layers: packed, and sharing what they begin with (two ways of `tests.gpu.speed`, one after the other).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.tables import markdown
from tests.gpu.workload import WORKLOADS

PACKED = "worker, compiled, rows staged"
SHARED = "worker, compiled, rows staged, prefixes shared"
SECONDS = 150


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=WORKLOADS, default="0.6b")
    parser.add_argument("--cases", nargs="+", default=["512+512", "1024+256"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args(arguments)
    asked = {name: value for name, value in vars(given).items() if name != "out"}
    cases: list[dict[str, Any]] = []
    for case in given.cases:
        prompt, completion = map(int, case.split("+"))
        cases.append({"prompt": prompt, "completion": completion, "ways": measure(prompt, completion, given)})
        given.out.write_text(json.dumps({"command": asked, "cases": cases}, indent=1))
    rows = []
    for case in cases:
        packed, shared = (case["ways"][name] for name in (PACKED, SHARED))
        seconds = [way["step_seconds"] for way in (packed, shared)]
        memory = [way["peak_bytes"] / 2**30 for way in (packed, shared)]
        rows.append((case["prompt"], case["completion"], *seconds, seconds[1] / seconds[0], *memory))
    columns = ("prompt", "completion", "s a step, packed", "shared", "of it", "peak GiB, packed", "shared")
    print(markdown(columns, rows))
    return 0


def measure(prompt: int, completion: int, given: argparse.Namespace) -> dict[str, Any]:
    """What `tests.gpu.speed` says of both ways."""
    length = ["--length", str(prompt + completion), "--prompt", str(prompt)]
    group = ["--rows", str(given.rows), "--group", str(given.group)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "speed.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += ["-m", "tests.gpu.speed", str(out), "--shape", given.shape, "--device", given.device]
        subprocess.run([*command, *length, *group, "--ways", PACKED, SHARED], check=True, timeout=SECONDS)
        found: dict[str, Any] = json.loads(out.read_text())
    if trouble := [way["error"] for way in found.values() if "error" in way]:
        raise RuntimeError(trouble[0])
    return found


if __name__ == "__main__":
    sys.exit(main())
