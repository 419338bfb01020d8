"""What a step on a GPU saves by computing once what the samples of a prompt begin with (`training.share_prefixes`).

    python -m tests.gpu.sharing OUT.json [--shape 0.6b] [--cases 512+512 1024+256] [--device cuda]

First attention itself, rows that begin alike in bfloat16 (by `varlen_attn` on a GPU) beside float64, with and without a
window. Then a step of 128 samples, 8 of each prompt, for each case of tokens of a prompt and of a completion, with
compiled layers: packed, and sharing what they begin with (two ways of `tests.gpu.speed`, one after the other). Exit
code 1 if attention or a loss is not what it should be.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.train.batching.packing import group_by_prefix, pack_shared_prefix
from pipeline.train.model.packed_attention import Segments, attend
from tests.bench.tables import judge, markdown
from tests.gpu.ceilings import time_ways
from tests.gpu.workload import WORKLOADS

PACKED = "worker, compiled, rows staged"
SHARED = "worker, compiled, rows staged, prefixes shared"
SECONDS = 150
OFF = 0.01
"""Most that attention and its gradients may be off, of their length: bfloat16 rounds to 0.004."""
SAME_LOSS = 1e-3
"""How far the losses of both ways may be apart over the steps: both compute in bfloat16, and add up in other orders."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=WORKLOADS, default="0.6b")
    parser.add_argument("--cases", nargs="+", default=["512+512", "1024+256"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {"command": {name: value for name, value in vars(given).items() if name != "out"}}
    found["attention"] = {str(window): attention(window, given.device) for window in (None, 3, 100)}
    found["cases"] = []
    for case in given.cases:
        prompt, completion = map(int, case.split("+"))
        found["cases"].append({"prompt": prompt, "completion": completion, "ways": measure(prompt, completion, given)})
        given.out.write_text(json.dumps(found, indent=1))
    columns = ("prompt", "completion", "s a step, packed", "shared", "of it", "peak GiB, packed", "peak GiB, shared")
    print(markdown(columns, [row_of(case) for case in found["cases"]]))
    off = max(each for way in found["attention"].values() for each in way.values())
    apart = max(losses_apart(case) for case in found["cases"])
    right = judge(f"attention at most {OFF:g} off, found {off:.2g}", off <= OFF)
    return right | judge(f"losses at most {SAME_LOSS:g} apart, found {apart:.2g}", apart <= SAME_LOSS)


def row_of(case: dict[str, Any]) -> tuple[float, ...]:
    packed, shared = (case["ways"][name] for name in (PACKED, SHARED))
    seconds = packed["step_seconds"], shared["step_seconds"]
    memory = packed["peak_bytes"] / 2**30, shared["peak_bytes"] / 2**30
    return (case["prompt"], case["completion"], *seconds, seconds[1] / seconds[0], *memory)


def losses_apart(case: dict[str, Any]) -> float:
    packed, shared = (case["ways"][name]["losses"] for name in (PACKED, SHARED))
    return max(abs(one - other) for one, other in zip(packed, shared, strict=True))


def attention(window: int | None, device: str) -> dict[str, float]:
    """How far attention and its gradients are off, of their length: 8 rows of each of 5 prompts, a row that is all of
    another, and two of the same tokens; 8 heads, 2 of keys and values."""
    draw = np.random.default_rng(0)
    rows = []
    for length in (1, 7, 64, 130, 300):
        prompt = draw.integers(0, 1000, length)
        rows += [np.concatenate([prompt, draw.integers(0, 1000, own)]) for own in draw.integers(1, 90, 8)]
    rows += [rows[-1], rows[-1][:-1]]
    lengths = [len(row) for row in rows]
    layout = pack_shared_prefix(lengths, group_by_prefix([row.astype(np.int32) for row in rows]))
    torch.manual_seed(0)
    drawn = [torch.randn(1, heads, layout.shape[1], 64, device=device).bfloat16() for heads in (8, 2, 2)]
    slope = torch.randn(1, layout.shape[1], 8, 64, device=device)
    segments = Segments.of(lengths, torch.device(device), layout.where)

    def computed(dtype: torch.dtype) -> list[torch.Tensor]:
        given = [each.to(dtype).requires_grad_() for each in drawn]
        output, _ = attend(torch.nn.Identity(), *given, None, segments=segments, sliding_window=window)
        gradients = torch.autograd.grad(output, given, slope.to(dtype))
        return [each.detach().double() for each in (output, *gradients)]

    names = ("output", "query", "key", "value")
    pairs = zip(names, computed(torch.bfloat16), computed(torch.float64), strict=True)
    return {name: float((found - exact).norm() / exact.norm()) for name, found, exact in pairs}


def measure(prompt: int, completion: int, given: argparse.Namespace) -> dict[str, Any]:
    """What `tests.gpu.speed` says of both ways."""
    asked = ["--shape", given.shape, "--device", given.device]
    asked += ["--length", str(prompt + completion), "--prompt", str(prompt)]
    asked += ["--rows", str(given.rows), "--group", str(given.group)]
    with tempfile.TemporaryDirectory() as folder:
        return time_ways((PACKED, SHARED), Path(folder) / "speed.json", 1, asked, SECONDS)


if __name__ == "__main__":
    sys.exit(main())
