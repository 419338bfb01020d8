"""The settings of the gateway's process.

Owns the settings, and their derivation from a run's config. Pure.
"""

from pathlib import Path

import msgspec

from pipeline.config import RunConfig
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.sampling_limits import Limits

MAX_ADAPTERS = 8
"""That a server holds at once."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gateway.

    Attributes:
        root: the folder of the store, its weights and its address.
        host, port: where it listens; port 0: any that is free.
        held: the process that started the gateway holds the port for it.
        keys: the file of API keys; empty: one key of the run's own, in `root`.
        base_names: names of the run's base model for clients, who receive the first one.
        tokenizer: what the SDK loads the tokenizer from.
        bases: the other base models: names, and what the SDK loads the tokenizer from.
        max_samples: sequences that a server runs at once.
        max_length, max_rank, request_bytes, session_seconds, whole_models, whole_servers, sampling, seed,
            snapshot_seconds, silent_seconds: of the config.
    """

    root: str
    host: str
    port: int
    keys: str
    base_names: tuple[str, ...]
    tokenizer: str
    max_length: int
    max_samples: int
    max_rank: int
    request_bytes: int
    session_seconds: float
    whole_models: bool
    whole_servers: int = 0
    bases: dict[str, str] = msgspec.field(default_factory=dict)
    sampling: bool
    seed: int
    held: bool = False
    snapshot_seconds: float = 3600.0
    silent_seconds: float = 120.0

    def checked_base(self, name: str) -> str:
        """`ApiError` for a name of a model that is not served."""
        if name not in self.all_bases:
            raise ApiError(f"base_model {name!r}; served here: {', '.join(self.all_bases)}")
        return name

    @property
    def all_bases(self) -> tuple[str, ...]:
        """All names of base models."""
        return (*self.base_names, *self.bases)

    def base_key(self, name: str) -> str:
        """The base of this name as in `Adapter`: the run's has no name."""
        return name if name in self.bases else ""

    def tokenizer_of(self, base: str) -> str:
        """What the SDK loads the tokenizer of a base (as in `Adapter`) from."""
        return self.bases.get(base, self.tokenizer)

    @property
    def limits(self) -> Limits:
        """The limits of a request to sample."""
        return Limits(self.max_length, self.max_samples)

    @property
    def store(self) -> Path:
        return Path(self.root) / "store.sqlite"

    @property
    def weights(self) -> Path:
        return Path(self.root) / "weights"

    @property
    def address(self) -> Path:
        return address_file(Path(self.root))

    @property
    def own_key(self) -> Path:
        return Path(self.root) / "key"


def settings_of(config: RunConfig, root: Path) -> Settings:
    """The settings that follow from a config whose model is at `model.path`."""
    serve = config.serve
    name = serve.base_name or Path(config.model.path).name
    return Settings(
        root=str(root),
        host=serve.host,
        port=serve.port,
        keys=serve.keys,
        base_names=tuple(dict.fromkeys((name, config.model.path))),
        tokenizer=config.model.path,
        max_length=config.model.max_length,
        max_samples=config.inference.max_sequences,
        max_rank=serve.max_rank,
        request_bytes=serve.request_bytes,
        session_seconds=serve.session_seconds,
        whole_models=serve.whole_models,
        whole_servers=serve.whole_servers,
        bases=serve.bases,
        sampling=serve.sampling,
        seed=config.seed,
        snapshot_seconds=serve.snapshot_seconds,
        silent_seconds=serve.silent_seconds,
    )


def address_file(root: Path) -> Path:
    """The file in which a gateway publishes its address."""
    return root / "address.json"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway listens: `url` for clients, and what a trainer has to know to come in."""

    url: str
    secret: str
    pid: int
