"""How long host memory takes to be pinned, how much of it that takes, and how fast a GPU writes it: ours and torch's.

    python -m tests.gpu.pinning [--gigabytes 12] [--block 100]

As many blocks of so many megabytes, one after the other as a commit has them made.
"""

import argparse
import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from pipeline.utils.pinned_memory import pinned_tensor
from tests.bench.tables import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--block", type=float, default=100.0, help="megabytes")
    asked = parser.parse_args()
    size, count = int(asked.block * 1e6), int(asked.gigabytes * 1e3 / asked.block)
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ways: list[tuple[str, Callable[[int], Tensor]]] = [
        ("pinned", pinned_tensor),
        ("torch, pin_memory", lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True)),
        ("pinned, again", pinned_tensor),  # torch keeps its blocks: it is asked once, between the others
    ]
    rows = [(name, *measure(make, source, count)) for name, make in ways]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {count * size / 1e9:.1f} GB")
    print(markdown(("way", "s to make", "GB/s", "held, of its size", "GB/s of a copy"), rows))


def measure(make: Callable[[int], Tensor], source: Tensor, count: int) -> tuple[float, float, float, float]:
    """Seconds, GB/s, bytes held over bytes asked for, and GB/s of copies from the GPU."""
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    blocks = [make(len(source)) for _ in range(count)]
    seconds, size = time.monotonic() - began, count * len(source)
    held = psutil.Process().memory_info().rss - before
    began = time.monotonic()
    for block in blocks:
        block.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return seconds, size / seconds / 1e9, held / size, size / (time.monotonic() - began) / 1e9


if __name__ == "__main__":
    main()
