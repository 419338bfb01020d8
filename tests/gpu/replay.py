"""What routing replay leaves of the difference between trainer and servers, in whole runs on GPUs.

    python -m tests.gpu.replay OUT.json [--shape moe] [--steps 30] [--lag 1] [--dry-run] [key=value …]

One run without `training.routing_replay` and one with it, as a user starts them (`tests.gpu.loop`): a trainer and a
vLLM server, both in bfloat16, whose weights change while it samples. All begin with the same random weights, large
enough that experts matter. `--trainers 2 --tensor 2 --ep 2` spreads experts over two processes of each side. With
`--alone SECONDS` both halves are first measured by themselves. `--ways rollout` makes one run only, so two calls can
make both at the same time. `--dry-run` prints the keys of the runs and the bytes of a token's record.
`--device cpu --shape tiny-moe --steps 3 --tokens 16` rehearses it without a GPU. Exits with 1 unless both runs end well
and the mean `mismatch_kl` with replay is at most half of that without.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import ModelConfig
from pipeline.config.routing_shape import shape_of_model
from tests.bench import bench_replay
from tests.gpu import loop
from tests.gpu.ceilings import measure
from tests.gpu.words import write_model
from tests.gpu.workload import WORKLOADS

INITIALIZER_RANGE = 0.04
"""With the 0.02 of most families, random experts hardly change a token's log-probability. With 0.1 trainer and server
differ by more than the check of first weights allows, from rounding alone."""
MIXTURES = tuple(name for name, shape in WORKLOADS.items() if "num_experts" in shape.model)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="moe", choices=MIXTURES)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--ep", type=int, default=1, help="processes that spread experts, on each side")
    parser.add_argument("--ways", nargs="+", default=[*bench_replay.WAYS], choices=bench_replay.WAYS)
    parser.add_argument("--alone", dest="ceilings", type=float, default=0.0, help="seconds for each half alone")
    parser.add_argument("--share", action="store_true", help="the server on the trainer's GPU")
    parser.add_argument("--seconds", type=float, default=270, help="for each of the two runs")
    parser.add_argument("--dry-run", action="store_true", help="print both runs, and the bytes of a token's record")
    parser.add_argument("overrides", nargs="*", help="further keys of both runs")
    given = parser.parse_intermixed_args(arguments)
    result: dict[str, Any] = {"command": {name: value for name, value in vars(given).items() if name != "out"}}
    result |= {"exits": {}, "ways": {}, "rates": {}}
    with tempfile.TemporaryDirectory() as folder:
        shape = WORKLOADS[given.shape]
        for way in given.ways:
            root = Path(folder) / way
            root.mkdir()
            write_model(root / "model", replace(shape, model=shape.model | {"initializer_range": INITIALIZER_RANGE}))
            chosen = loop.asked_for([str(given.out), *arguments_of(given, way)])
            if given.dry_run:
                record = shape_of_model(ModelConfig(path=str(root / "model"), init="random"))
                print(way, *loop.overrides(root, chosen), f"({record.token_bytes} bytes for each token)")
                continue
            if chosen.ceilings and "alone" not in result:
                result["alone"] = measure(loop.halves(chosen), root / "model")
            began = time.time()

            def note(ran: dict[str, Any], way: str = way, root: Path = root, began: float = began) -> None:
                """Write the result's file, as far as this run has come: whatever ends it, its steps are kept."""
                trained = loop.trained(root)
                result["exits"][way] = ran["exit"]
                result["ways"][way] = [bench_replay.steps_of(trained)]
                result["rates"][way] = loop.with_efficiency({"alone": result.get("alone")} | loop.rates(trained, began))
                given.out.write_text(json.dumps(result, indent=1))

            note(loop.run(root, chosen, stepped=note))
    if given.dry_run:
        return 0
    return bench_replay.report(result["ways"]) or int(any(result["exits"].values()))


def arguments_of(given: argparse.Namespace, way: str) -> list[str]:
    """The arguments of `tests.gpu.loop` for one run."""
    names = ("shape", "device", "steps", "lag", "tokens", "trainers", "tensor", "ep", "ceilings", "seconds")
    plain = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]
    overrides = [f"training.routing_replay={way}", "loss.old_logprobs=recompute", *given.overrides]
    return [*plain, *(["--share"] if given.share else []), *overrides]


if __name__ == "__main__":
    sys.exit(main())
