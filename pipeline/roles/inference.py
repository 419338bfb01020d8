"""The inference role: one server of the run's inference engine (`inference.engine`).

Owns the start of a server and its readiness check. Promises that the server listens only on its placement's address,
requires the world's password on every privileged route, and starts without the policy, unless the run only evaluates:
the trainer sends the policy before any request (`pipeline.inference.weight_sync`). The role's process is the engine's.
"""

from http.client import HTTPConnection, HTTPException

from pipeline.config import RunConfig
from pipeline.inference.engine_protocol import SERVER, ClientModel
from pipeline.inference.engine_registry import find_engine
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.tinker.entities import BASE
from pipeline.tinker.gateway_settings import MAX_ADAPTERS
from pipeline.tinker.server_pools import pool_of
from pipeline.topology.plan import Placement
from pipeline.utils.authenticated_http import connect
from pipeline.utils.network_interfaces import bound_to

_PROBE_SECONDS = 5.0


def launch(context: RoleContext) -> RoleCommand:
    """The server's command; ready once the server answers, even without weights. `ConfigError` if the engine is not
    installed as the run needs it, or if the server's GPUs cannot run it."""
    config, placement = context.config, context.placement
    engine = find_engine(config.inference.engine)
    engine.check_installed()
    engine.check_gpus(config, placement.gpus)
    return RoleCommand(
        argv=server_command(config, placement),
        env=engine.environment(config, placement, context.paths.world)
        | engine.adapter_environment(config, context.paths.adapters(placement.name))
        | bound_to(placement.address),
        ready=lambda: is_healthy(placement.address, placement.ports[0], context.world.password),
        stage=SERVER if engine.imports(config).modules else "",
    )


def server_command(config: RunConfig, placement: Placement) -> tuple[str, ...]:
    """The argv of the server with this placement, whose index decides what it serves to API clients."""
    return find_engine(config.inference.engine).command(config, placement, _client_model(config, placement.index))


def _client_model(config: RunConfig, index: int) -> ClientModel | None:
    if not config.serve.enabled:
        return None
    pool = pool_of(config.serve, index)
    path = config.serve.bases.get(pool.base, config.model.path)
    return ClientModel(path, BASE, adapters=0 if pool.whole else MAX_ADAPTERS)


def is_healthy(address: str, port: int, password: str) -> bool:
    """Whether this attempt's server answers there and its engine runs; `ImpostorError` for another program."""
    connection = HTTPConnection(address, port, timeout=_PROBE_SECONDS)
    try:
        connect(connection, password)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
