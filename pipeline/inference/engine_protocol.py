"""What an inference engine, the program of a server, must offer.

Owns the protocol of an engine, and the names that requests and servers share. A folder `pipeline/inference/<name>/`
with a module `<name>_engine`, whose `ENGINE` implements `InferenceEngine`, is an engine; `inference.engine=<name>`
selects it. `pipeline.roles.inference` starts its servers.

A server speaks HTTP, on its placement's address only. Every route except the first two requires the world's password
(`pipeline.utils.mutual_auth`). Clients rely on these routes:

| route | client | meaning |
|---|---|---|
| `GET /health` | `roles.inference` | 200 once the server can answer; polled throughout its life |
| `GET /rollcall/proof` | `utils.authenticated_http` | the server's proof that it knows the password |
| `POST /inference/v1/generate` | `rollout.server_client` | tokens in; tokens, log-probabilities, versions out |
| `POST /inference/v1/abort_requests` | `rollout.server_client` | end requests with their partial results |
| `POST /v1/completions`, `/v1/chat/completions` | `rollout.load_balancing_proxy` | text, for benchmark commands |
| `POST /init_weight_transfer_engine`, `/collective_rpc` | `inference.weight_sync` | join the trainer's weight group |
| `POST /collective_rpc`, `/update_weights`, `/finish_weight_update` | `inference.weight_sync` | other weights |
| `POST /pause`, `/resume`, `/reset_prefix_cache` | `inference.weight_sync` | hold requests meanwhile |
| `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter` | `tinker.server_weights` | clients' adapters |
| `POST /load_weights` | `tinker.server_weights` | clients' whole models |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.topology.plan import Placement
from pipeline.utils.fork_server import Stage

SERVER = "server"
"""The stage of a fork server from which servers start."""
POLICY = "policy"
"""The model name in every request: the model that a server serves, or the adapter on it."""


@dataclass(frozen=True)
class ClientModel:
    """What a server serves whose clients train (`serve.enabled`).

    Attributes:
        path: the base model on disk.
        name: the name of the base in requests.
        adapters: the number of clients' adapters on the base that a server holds at a time; 0: whole models of clients
            take the place of the base.
    """

    path: str
    name: str
    adapters: int


class InferenceEngine(Protocol):
    """An inference engine.

    Attributes:
        socket_variables: environment variables that name a folder for its sockets, whose path must be short.
        cache_variables: environment variables that name a cache of compiled code, by default in the home directory.
    """

    @property
    def socket_variables(self) -> tuple[str, ...]: ...

    @property
    def cache_variables(self) -> tuple[str, ...]: ...

    def check_installed(self) -> None:
        """`ConfigError` unless this Python can start servers. Does not import the engine."""
        ...

    def check_model(self, config: RunConfig, family: str, experts: int) -> None:
        """`ConfigError` for a model that a server cannot serve, or whose weights it cannot update.

        `family` is the `model_type` of the model's config, and `experts` its number of experts per layer.
        """
        ...

    def check_config(self, config: RunConfig) -> None:
        """`ConfigError` for settings that the installed release refuses."""
        ...

    def check_gpus(self, config: RunConfig, gpus: Sequence[int]) -> None:
        """`ConfigError` for settings that a server cannot use on one of these GPUs of this machine."""
        ...

    def warnings(self, config: RunConfig) -> Iterator[str]:
        """Reasons why a server may fail at its start that could not be checked here, one line each."""
        ...

    def imports(self, config: RunConfig) -> Stage:
        """What a fork server imports for its servers. Without modules, servers start with exec."""
        ...

    def command(self, config: RunConfig, placement: Placement, clients: ClientModel | None) -> tuple[str, ...]:
        """The argv of a server. `inference.extra_args` come last, so they take precedence."""
        ...

    def environment(self, config: RunConfig, placement: Placement, world: Path) -> dict[str, str]:
        """A server's variables in addition to the agent's. The password is in the file `world`, never in a variable."""
        ...

    def adapter_environment(self, config: RunConfig, folder: Path) -> dict[str, str]:
        """Further variables of a server that loads adapters. Creates `folder` for a policy that the trainer writes."""
        ...
