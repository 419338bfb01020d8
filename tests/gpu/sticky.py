"""What it gains on GPUs that an episode's turns go to one server: `tests.bench.bench_sticky_routing` with 0.6B.

    python -m tests.gpu.sticky OUT.json [--shape 0.6b] [--servers 3] [--rounds 3] [--seconds 30] [--concurrency 48] …

All servers share the first GPU; their weights are random.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import torch

from tests.bench.bench_sticky_routing import LENGTH, add_options, measure, table
from tests.gpu.weights import servers
from tests.gpu.workload import WORKLOADS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--servers", type=int, default=3)
    add_options(parser, episodes=96, concurrency=48)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        WORKLOADS[given.shape].write_model(model)
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
        (model / "config.json").write_text(json.dumps(config))
        keys = {"length": LENGTH, "gpu_memory": 0.85}
        with servers(model, [0] * given.servers, 1, 1, given.servers, **keys) as endpoints:
            rounds = asyncio.run(measure(endpoints, given))
    command = {name: value for name, value in vars(given).items() if name != "out"}
    result = {"command": command, "gpu": torch.cuda.get_device_name(), "rounds": rounds}
    given.out.write_text(json.dumps(result, indent=1))
    print(table(rounds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
