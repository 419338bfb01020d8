"""Attention with sinks, and with values of another width, by the kernel of a GPU against float64.

    python -m tests.gpu.sinks OUT.json [--length 16384]

Packed and shared rows, windows, grouped heads, eager and compiled: the distance of outputs and gradients from the same
function in float64, relative to their length, beside the distance without sinks, which is rounding. Then milliseconds
and peak memory of forward and backward passes of `--length` tokens in gpt-oss's shape. Fails above `BOUND`.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.train.model.packed_attention import Segments, attend

BOUND = 0.02
"""Of a relative distance: bfloat16 has 2⁻⁸ for each number."""
LENGTHS = (300, 7, 64, 129)
PREFIX = 40
SHAPES = {"gpt-oss": (8, 2, 64, 64), "deepseek-v3": (4, 4, 192, 128)}
"""Query heads, key heads, numbers of a key and of a value."""


def where_of(shared: bool) -> np.ndarray[Any, Any] | None:
    """Where rows of `LENGTHS` have their tokens, of which all but the second begin with the same `PREFIX` ones."""
    if not shared:
        return None
    rows, done = [], LENGTHS[0]
    rows.append(np.arange(done))
    for length in LENGTHS[1:]:
        own = length if length < PREFIX else length - PREFIX
        rows.append(np.concatenate([np.arange(length - own), np.arange(done, done + own)]))
        done += own
    return np.concatenate(rows)


def gradients(tensors: list[Tensor], device: str, dtype: torch.dtype, compiled: bool, options: dict[str, Any]) -> Any:
    """The output, and the gradients of queries, keys, values and sinks, in float64 on the CPU."""
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    segments = Segments.of(LENGTHS, torch.device(device), options["where"])
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    sinks = inputs[3] if options["sinks"] else None
    more = {"segments": segments, "sliding_window": options["window"], "s_aux": sinks}
    output, _ = function(torch.nn.Identity(), *inputs[:3], None, **more)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    slopes = torch.autograd.grad(output, inputs[: 4 if options["sinks"] else 3], slope)
    return [tensor.double().cpu() for tensor in (output, *slopes)]


def compare(name: str, device: str) -> list[dict[str, Any]]:
    heads, groups, size, value_size = SHAPES[name]
    rows = []
    for shared, window, sinks, compiled in product((False, True), (None, 16), (False, True), (False, True)):
        where = where_of(shared)
        length = sum(LENGTHS) if where is None else int(where.max()) + 1
        draw = torch.Generator().manual_seed(0)
        shapes = [(1, heads, length, size), (1, groups, length, size), (1, groups, length, value_size), (heads,)]
        tensors = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
        options = {"where": where, "window": window, "sinks": sinks}
        found = gradients(tensors, device, torch.bfloat16, compiled, options)
        exact = gradients(tensors, "cpu", torch.float64, False, options)
        far = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
        labels = zip(("output", "query", "key", "value", "sinks"), far, strict=False)
        rows.append(
            {"shape": name, "shared": shared, "window": window, "sinks": sinks, "compiled": compiled} | dict(labels)
        )
        torch._dynamo.reset()
    return rows


def measure(length: int, sinks: bool, window: int | None) -> dict[str, Any]:
    """Milliseconds and GiB of a forward and backward pass of four rows in the shape of a layer of gpt-oss-20b."""
    tensors = [torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for heads in (64, 8, 8)]
    inputs = [*(tensor.requires_grad_() for tensor in tensors), torch.zeros(64, device="cuda", requires_grad=True)]
    more = {"segments": Segments.of([length // 4] * 4, torch.device("cuda")), "sliding_window": window}
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        output, _ = attend(torch.nn.Identity(), *inputs[:3], None, s_aux=inputs[3] if sinks else None, **more)
        output.sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"sinks": sinks, "window": window, "milliseconds": 1e3 * sorted(times)[3], "peak_gib": gib}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=16_384)
    given = parser.parse_args()
    rows = [row for name in SHAPES for row in compare(name, "cuda")]
    speed = [measure(given.length, *case) for case in product((False, True), (None, 128))]
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    given.out.write_text(
        json.dumps({**machine, "bound": BOUND, "errors": rows, "length": given.length, "speed": speed})
    )
    worst = {key: max(row[key] for row in rows if key in row) for key in ("output", "query", "key", "value", "sinks")}
    print(json.dumps({"worst": worst, "speed": speed}, indent=1))
    return 0 if all(value <= BOUND for value in worst.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
