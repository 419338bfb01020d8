"""The Tinker API on two GPUs, one that trains and one that serves: what clients get of what each gives alone.

    python -m tests.gpu.tinker OUT.json [--clients 1 4 16] [--seconds 440] [key=value …]
    python -m tests.gpu.tinker OUT.json --device cpu --shape tiny --data 8 --length 64 --tokens 32     # a rehearsal

First the dispatch alone trains adapters on the first GPU. Then the run that a user starts, `launchers/serve.py
cluster=local`, does the same steps for clients of the SDK, and samples for them beside the same requests to its server
itself. A step has `--data` data of `--length` tokens; a request has 8 samples of `--tokens` tokens. Each figure is
written to OUT.json as soon as it is known; what does not fit into `--seconds` is left out.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.tinker.gateway_settings import Address, address_file
from pipeline.topology.plan import World
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from slurm.submission.compose_config import compose_config
from slurm.submission.serve_tinker import with_base
from tests.bench.tables import markdown
from tests.gpu import children
from tests.gpu.loop import logs_of
from tests.gpu.words import write_model
from tests.gpu.workload import WORKLOADS

ROUNDS, SAMPLES = 2, 8
START_SECONDS, END_SECONDS = 300.0, 60.0
Write = Callable[[str, int, str, float], None]
"""Notes what was measured (`training` or `sampling`), with how many clients, the way, and tokens a second."""


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_intermixed_args(arguments)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"command": {name: value for name, value in vars(chosen).items() if name != "out"}}
    started = time.monotonic()

    def write(what: str, clients: int, way: str, rate: float) -> None:
        found.setdefault(what, {}).setdefault(str(clients), {})[way] = rate
        found["seconds"] = time.monotonic() - started
        chosen.out.write_text(json.dumps(found, indent=1))
        print(f"{found['seconds']:.0f} s: {what} with {clients} clients, {way}: {rate:.0f} tokens/s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", WORKLOADS[chosen.shape])
        overrides = _overrides(Path(folder), chosen)
        config = with_base(compose_config([*overrides, "serve.enabled=true", "training.steps=0"]))
        _in_a_process_of_its_own(config, chosen, write)
        with serving(config, overrides, chosen) as (address, key):
            measure(config, address, key, chosen, write, started + chosen.seconds)
    print(table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=24, help="of all clients together, but four of each at least")
    parser.add_argument("--data", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=440, help="after which nothing more is begun")
    parser.add_argument("overrides", nargs="*", help="further keys of the run's config")
    return parser


def _overrides(root: Path, chosen: argparse.Namespace) -> list[str]:
    """The run, as keys of the config."""
    on_gpus = [
        "resources.device=cuda",
        "resources.gpus_per_node=2",
        "resources.trainer.gpus=1",
        "resources.inference.gpus=1",
        "model.dtype=bfloat16",
    ]
    return [
        "experiment=tinker",
        "cluster=local",
        "name=tinker",
        f"output={root / 'runs'}",
        f"model.path={root / 'model'}",
        "model.init=random",
        f"model.max_length={max(chosen.length, chosen.tokens + 64)}",
        f"training.micro_batch_tokens={min(16_384, chosen.data * chosen.length)}",
        "serve.port=0",
        "serve.sampling=true",
        "serve.base_name=measured",
        f"serve.max_rank={chosen.rank}",
        "resources.inference.nodes=1",
        f"cluster.startup_seconds={START_SECONDS:.0f}",
        *(on_gpus if chosen.device == "cuda" else []),
        *chosen.overrides,
    ]


def _steps(clients: int, chosen: argparse.Namespace) -> int:
    return max(4, int(chosen.steps) // clients)


def _rate(train: Callable[[int], None], clients: int, chosen: argparse.Namespace) -> float:
    """Tokens a second, the best of the rounds: what comes between makes it slower, never faster."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        train(_steps(clients, chosen))
        seconds.append(time.perf_counter() - began)
    return float(clients * _steps(clients, chosen) * chosen.data * chosen.length / min(seconds))


def _in_a_process_of_its_own(config: RunConfig, chosen: argparse.Namespace, write: Write) -> None:
    """`_alone`, so that its GPU is free before the run looks for one."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_alone, args=(config.model_dump_json(), chosen, sending))
    child.start()
    sending.close()
    try:
        while True:
            write("training", *receiving.recv())
    except EOFError:
        child.join(60)
    if child.exitcode:
        raise SystemExit(f"the dispatch alone ended with {child.exitcode}")


def _alone(config_text: str, chosen: argparse.Namespace, sending: Any) -> None:
    """Send clients, way and tokens a second of the dispatch, for each number of clients."""
    from tests.support.models.jobs import world_of_one

    config = RunConfig.model_validate_json(config_text)
    with world_of_one(config.training.micro_batch_tokens, chosen.device) as dispatch:
        for clients in chosen.clients:
            with (
                tempfile.TemporaryDirectory() as folder,
                _work(chosen).alone(dispatch, config, clients, Path(folder)) as train,
            ):
                sending.send((clients, "alone", _rate(train, clients, chosen)))


def _work(chosen: argparse.Namespace) -> Any:
    from tests.support.tinker_traffic import Training

    return Training(chosen.data, chosen.length, WORKLOADS[chosen.shape].model["vocab_size"], chosen.rank)


@contextmanager
def serving(config: RunConfig, overrides: Sequence[str], chosen: argparse.Namespace) -> Iterator[tuple[Address, str]]:
    """The run, and how clients reach it; prints its logs if what is done with it fails."""
    paths = RunPaths(config.directory.resolve())
    log = chosen.out.with_suffix(".log")
    base = [f"model.path={config.model.path}", "model.init=pretrained"]
    command = [sys.executable, "launchers/serve.py", *overrides, *base]
    environment = os.environ | {"HYDRA_FULL_ERROR": "1"}
    with log.open("wb") as out, children.started(command, out, environment, END_SECONDS) as launcher:

        def there() -> bool:
            assert launcher.poll() is None, log.read_text()
            return shared_files.read_document(address_file(paths.api), Address) is not None

        try:
            wait_for("the gateway", there, START_SECONDS, missing=log.read_text)
            address = shared_files.read_document(address_file(paths.api), Address)
            assert address is not None
            yield address, (paths.api / "key").read_text()
        except BaseException:
            for name, text in {"launcher": log.read_text(), **logs_of(paths.root)}.items():
                print(f"--- {name}", *text.splitlines()[-25:], sep="\n", flush=True)
            raise


def measure(
    config: RunConfig, address: Address, key: str, chosen: argparse.Namespace, write: Write, end: float
) -> None:
    """What clients get, as long as there is time."""
    import tinker

    from pipeline.tinker.entities import SampledWeights
    from tests.support.tinker_traffic import Sampling, folder_of

    paths = RunPaths(config.directory.resolve())
    opened = [tinker.ServiceClient(base_url=address.url, api_key=key) for _ in range(max(chosen.clients))]
    for clients in chosen.clients:
        if time.monotonic() < end:
            train = _work(chosen).served(opened[:clients], config.serve.base_name)
            write("training", clients, "served", _rate(train, clients, chosen))
    trainer = opened[0].create_lora_training_client(base_model=config.serve.base_name, rank=chosen.rank).result()
    path = trainer.save_weights_for_sampler("measured").result().path
    samplers = [each.create_sampling_client(model_path=path).result() for each in opened]
    model = SampledWeights(folder_of(paths.api / "weights", path)).name
    for clients in chosen.clients:
        work = Sampling(8 * clients + 8, SAMPLES, chosen.tokens)
        tokens = work.requests * work.samples * work.tokens
        for way in ("warm", "raw", "served"):
            if time.monotonic() > end:
                return
            if way == "raw":
                world = _world(paths)
                (server,) = world.of_role("inference")
                write("sampling", clients, way, tokens / work.raw(server.endpoint, world.password, model, clients))
            elif way == "served":
                write("sampling", clients, way, tokens / work.served(samplers[:clients]))
            else:
                Sampling(2 * clients, SAMPLES, chosen.tokens).served(samplers[:clients])


def _world(paths: RunPaths) -> World:
    """Of the run's newest attempt."""
    identity = shared_files.read_document(paths.run, RunIdentity)
    newest = max(paths.attempts.iterdir(), key=lambda folder: folder.stat().st_ctime)
    assert identity is not None
    world = shared_files.read_document(paths.attempt(identity.run_id, newest.name).world, World)
    assert world is not None
    return world


def table(found: dict[str, Any]) -> str:
    """Tokens a second of both ways, and the ratio."""
    rows: list[list[object]] = []
    for what, base in (("training", "alone"), ("sampling", "raw")):
        for clients, rates in found.get(what, {}).items():
            if {base, "served"} <= rates.keys():
                ratio = rates["served"] / rates[base]
                rows.append([what, int(clients), rates[base], rates["served"], ratio])
    return markdown(["what", "clients", "tokens/s alone", "tokens/s served", "ratio"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
