"""What it brings a server to record larger steps as CUDA graphs than vLLM does, which stops at 512 tokens.

    python -m tests.gpu.graphs OUT.json [--shape 0.6b] [--sizes 512 1024] [--requests 512] [--seconds 20] [--api 8]

Needs two GPUs. Two servers that differ only in their largest recorded step are asked the same at the same time, each on
a GPU of its own; then they are started again on each other's GPU. Tokens a second for completions of one length, and
with a long tail, asked for in groups, as a run does, and one by one, where nearly every step has a prompt in it.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.gpu.pulse import tokens_made
from tests.gpu.traffic import Traffic
from tests.gpu.weights import SECRET, a_server, gpu_config, wait_until_ready
from tests.gpu.words import write_model
from tests.gpu.workload import WORKLOADS

ENDS = 64
"""Token ids that end a completion with a long tail: of 32,000, one in 500."""
GROUP = 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--sizes", type=int, nargs=2, default=[512, 1024], help="the largest recorded step of each")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each kind of work")
    parser.add_argument("--api", type=int, default=8)
    parser.add_argument("--once", action="store_true", help="do not change places")
    chosen = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, WORKLOADS[chosen.shape])
        for sizes in [chosen.sizes] if chosen.once else [chosen.sizes, chosen.sizes[::-1]]:
            with two_servers(model, sizes, chosen.api) as endpoints:
                for name, traffic in kinds(chosen).items():
                    with ThreadPoolExecutor(2) as pool:
                        rates = list(pool.map(lambda endpoint, traffic=traffic: rate(traffic, endpoint), endpoints))
                    rows.append({"work": name} | dict(zip(map(str, sizes), rates, strict=True)))
                    print(rows[-1], flush=True)
    chosen.out.write_text(json.dumps({"command": {**vars(chosen), "out": ""}, "rows": rows}, indent=1))
    return 0


@contextmanager
def two_servers(model: Path, sizes: Sequence[int], api: int) -> Iterator[list[str]]:
    """One on each of the first two GPUs, with these largest recorded steps."""
    with ExitStack() as started:
        children = []
        for index, size in enumerate(sizes):
            graphs = ("--max-cudagraph-capture-size", str(size))
            config = gpu_config(model, 1, api, length=2112, extra_args=graphs)
            children.append(started.enter_context(a_server(config, model, index, index)))
        yield wait_until_ready(children)


def kinds(chosen: argparse.Namespace) -> dict[str, Traffic]:
    """The work, by name; `endpoint` is to be filled in."""
    fixed = Traffic("", SECRET, chosen.requests, chosen.seconds, 512, group=GROUP)
    tailed = replace(fixed, tokens=2048, ends=ENDS)
    return {"512 tokens": fixed, "long tail, groups": tailed, "long tail, one by one": replace(tailed, group=1)}


def rate(traffic: Traffic, endpoint: str) -> float:
    """Tokens a second of the server, by its own count, in the second half of the time."""
    with replace(traffic, endpoint=endpoint).running():
        time.sleep(0.45 * traffic.seconds)
        began, before = time.monotonic(), tokens_made(endpoint)
        time.sleep(0.5 * traffic.seconds)
        return (tokens_made(endpoint) - before) / (time.monotonic() - began)


if __name__ == "__main__":
    raise SystemExit(main())
