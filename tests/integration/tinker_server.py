"""A server of the Tinker API for tests: a gateway and a trainer, two processes that can be killed and started again."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from pipeline.config import RunConfig
from pipeline.tinker.gateway_settings import Address, settings_of
from pipeline.train.service.random_base import write_base
from pipeline.utils import shared_files
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.models.jobs import config_of
from tests.support.servers.vllm import SECRET, TINY, Served, starting_of

ROOT = Path(__file__).parents[2]


@dataclass
class TinkerServer:
    """Below `root`, the folder of a run: `api/` is the gateway's, `checkpoints/` the trainer's."""

    root: Path
    config: RunConfig
    ranks: int = 1
    servers: Sequence[str] = ()
    gateway: "subprocess.Popen[bytes] | None" = None
    trainers: list[Child] = field(default_factory=list)
    attempts: int = 0

    @property
    def api(self) -> Path:
        return self.root / "api"

    @property
    def url(self) -> str:
        address = shared_files.read_document(self.api / "address.json", Address)
        assert address is not None
        return address.url

    @property
    def key(self) -> str:
        return (self.api / "key").read_text()

    def start(self) -> "TinkerServer":
        self.start_gateway()
        self.start_trainer()
        return self

    def start_gateway(self) -> None:
        settings = settings_of(self.config, self.api)
        command = [sys.executable, "-m", "pipeline.tinker.gateway_process", msgspec.json.encode(settings).decode()]
        (self.api).mkdir(parents=True, exist_ok=True)
        with (self.root / "gateway.log").open("ab") as log:
            gateway = self.gateway = subprocess.Popen(command, stdout=log, stderr=log)

        def listens() -> bool:
            assert gateway.poll() is None, (self.root / "gateway.log").read_text()
            address = shared_files.read_document(self.api / "address.json", Address)
            return address is not None and address.pid == gateway.pid

        wait_for("the gateway", listens, WAIT_SECONDS)

    def start_trainer(self) -> None:
        """One world of ranks; they find each other at a port of their own."""
        self.attempts += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "tests.integration.served_trainer"]
        command += [self.config.model_dump_json(), str(self.api), f"local-{self.attempts}", *self.servers]
        for rank in range(self.ranks):
            place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = os.environ | {name: str(value) for name, value in place.items()} | {"PYTHONPATH": str(ROOT)}
            self.trainers.append(Child(command, self.root / f"trainer.{rank}.log", env, forks.request()))
        run = "the trainer to run"
        wait_for(run, lambda: all(each.poll() is not None or each.pid for each in self.trainers), WAIT_SECONDS)

    def kill_trainer(self) -> None:
        for trainer in self.trainers:
            trainer.kill()
        self.trainers = []

    def kill_gateway(self) -> None:
        if self.gateway is not None:
            self.gateway.kill()
            self.gateway.wait(WAIT_SECONDS)

    def stop(self) -> None:
        self.kill_trainer()
        self.kill_gateway()


@contextmanager
def serving(root: Path, model: Path, ranks: int = 1, **serve: Any) -> Iterator[TinkerServer]:
    """A server whose trainer has so many ranks."""
    plain = config_of(model)
    settings = plain.serve.model_copy(update={"enabled": True, "port": 0, "base_name": "tiny", **serve})
    server = TinkerServer(root, plain.model_copy(update={"serve": settings}), ranks)
    try:
        yield server.start()
    finally:
        server.stop()


@contextmanager
def serving_samples(
    root: Path,
    addresses: Sequence[str],
    base: Path | None = None,
    max_length: int = 64,
    inference: Mapping[str, Any] = MappingProxyType({}),
    **serve: Any,
) -> Iterator[tuple[TinkerServer, list[Served]]]:
    """A server beside whose trainer vLLM samples at these addresses; of the demo's tiny model with random weights,
    unless there is a `base`. `inference` are keys of that section of the config."""
    if base is None:
        base = root / "base"
        write_base(TINY, base, seed=5)
    root.mkdir(parents=True, exist_ok=True)
    plain = config_of(base)
    settings = plain.serve.model_copy(
        update={"enabled": True, "port": 0, "base_name": "tiny", "sampling": True, "max_rank": 8, **serve}
    )
    model = plain.model.model_copy(update={"max_length": max_length})
    training = plain.training.model_copy(update={"micro_batch_tokens": 4 * max_length})
    sampling = plain.inference.model_copy(update=dict(inference))
    sections = {"serve": settings, "model": model, "training": training, "inference": sampling}
    config = plain.model_copy(update=sections)
    with ExitStack() as started:
        starts = [starting_of(config, address, index=index) for index, address in enumerate(addresses)]
        ready = [started.enter_context(start) for start in starts]
        samplers = [wait() for wait in ready]
        server = TinkerServer(root, config, servers=[SECRET, *(each.endpoint for each in samplers)])
        started.callback(server.stop)
        yield server.start(), samplers
