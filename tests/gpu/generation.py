"""What log-probabilities cost a server, with and without the cheaper way that they take.

    python -m tests.gpu.generation OUT.json [--shape 0.6b] [--requests 256 512] [--seconds 8] [--api 4]

Needs one GPU. Each row is one server: tokens a second with log-probabilities, without them, and the ratio.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.traffic import Traffic
from tests.gpu.weights import SECRET, servers
from tests.gpu.workload import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--api", type=int, default=4)
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        WORKLOADS[chosen.shape].write_model(model)
        for fast in (True, False):
            with servers(model, [0], 1, chosen.api, compact_logprobs=fast) as (endpoint,):
                for requests in (chosen.requests[0], *chosen.requests):  # the first one warms up
                    rows.append({"fast_logprobs": fast, "requests": requests, **measure(endpoint, requests, chosen)})
                    print(rows[-1], flush=True)
    chosen.out.write_text(json.dumps({"shape": chosen.shape, "api": chosen.api, "rows": rows}, indent=1))
    return 0


def measure(endpoint: str, requests: int, chosen: argparse.Namespace) -> dict[str, float]:
    rates = {}
    for name, logprobs in (("with", True), ("without", False)):
        with Traffic(endpoint, SECRET, requests, chosen.seconds, logprobs=logprobs).running() as answers:
            pass
        rates[name] = answers.tokens_per_second
    return rates | {"ratio": rates["with"] / rates["without"]}


if __name__ == "__main__":
    raise SystemExit(main())
