"""The gateway's process: `python -m pipeline.tinker.gateway_process <settings as JSON>`.

Owns its start and its end. Promises that the process publishes its address once it listens, with a secret that only the
run's owner can read, and that after a restart it listens at the same address if the address is free.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from pipeline.errors import ConfigError, RollcallError
from pipeline.tinker import tinker_wire
from pipeline.tinker.api_keys import Keys, own_key
from pipeline.tinker.durable_store import Store
from pipeline.tinker.gateway import Gateway
from pipeline.tinker.gateway_settings import MAX_ADAPTERS, Address, Settings
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_records import ServerFacts
from pipeline.tinker.trainer_routes import TrainerRoutes
from pipeline.utils import shared_files
from pipeline.utils.connection_limits import MAX_UNPROVED, ConnectionLimiter, raise_open_files
from pipeline.utils.limited_site import LimitedSite, limit_connections

log = logging.getLogger(__name__)
LOOK_SECONDS, SWEEP_SECONDS = 2.0, 30.0


def main(arguments: list[str]) -> int:
    from pipeline.utils import logs, subprocesses

    subprocesses.exit_with_parent()
    logs.configure("gateway")
    settings = msgspec.json.decode(arguments[0], type=Settings)
    try:
        asyncio.run(serve(settings))
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


async def serve(settings: Settings, stop: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set, or INT or TERM came; raises `ConfigError` before anything is served."""
    tinker_wire.protocol()
    keys = Keys(Path(settings.keys)) if settings.keys else Keys(own=own_key(settings.own_key))
    keys.check()
    store = Store(settings.store)
    stop = stop or _stopped_by_signals()
    registry = ModelRegistry(store)
    sampling = SampleQueue(store, settings.weights, settings.limits, MAX_ADAPTERS, registry.usage)
    registry.heartbeats.silent_seconds = settings.silent_seconds
    registry.heartbeats.subscribers.append(sampling.set_silent)
    registry.on_lapsed = sampling.cancel_session
    registry.catalog.on_removed = lambda folder: _remove(settings.weights, folder)
    registry.catalog.open_folders, registry.catalog.snapshot_seconds = sampling.open_folders, settings.snapshot_seconds
    known = _known(settings)
    secret = known.secret if known else secrets.token_hex(16)
    gateway = Gateway(settings, registry, sampling, keys, secret)

    def changed(facts: ServerFacts | None) -> None:
        gateway.attached = facts is not None
        sampling.set_servers(facts)
        log.info("the trainer is %s", "there" if facts else "gone")

    trainer_routes = TrainerRoutes(registry, secret, changed)
    app = web.Application(client_max_size=0)  # clients are held to their limit by `Gateway`
    raise_open_files()
    admission = limit_connections(app, "the gateway", MAX_UNPROVED)
    gateway.add_routes(app)
    trainer_routes.add_routes(app)
    runner = web.AppRunner(app, auto_decompress=False, access_log=None)
    try:
        await sampling.start()
        await runner.setup()
        await _listen(settings, runner, admission, trainer_routes, known)
        await _sweep_until(settings, registry, sampling, trainer_routes, stop)
    finally:
        await sampling.close()
        await runner.cleanup()
        await registry.usage.flush()
        store.close()


async def _listen(
    settings: Settings,
    runner: web.AppRunner,
    admission: ConnectionLimiter,
    trainer_routes: TrainerRoutes,
    known: Address | None,
) -> None:
    """At the address of last time if it is free and no other is asked for; then tell it."""
    earlier = int(known.url.rpartition(":")[2]) if known and not settings.port else settings.port
    for port in dict.fromkeys((earlier, settings.port)):
        site = LimitedSite(runner, settings.host, port, admission, settings.held)
        try:
            await site.start()
        except OSError as error:
            if port == settings.port:
                where = f"{settings.host}:{port}"
                raise ConfigError("serve.port", where, "an address that is free", str(error)) from None
        else:
            break
    port = runner.addresses[0][1]
    address = Address(url=f"http://{settings.host}:{port}", secret=trainer_routes.secret, pid=os.getpid())
    shared_files.write_document(settings.address, address)
    log.info("serving at %s", address.url)


async def _sweep_until(
    settings: Settings,
    registry: ModelRegistry,
    sampling: SampleQueue,
    trainer_routes: TrainerRoutes,
    stop: asyncio.Event,
) -> None:
    rounds = 0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
        trainer_routes.look()
        await registry.usage.flush()
        rounds += 1
        try:
            await registry.look()
            if rounds % int(SWEEP_SECONDS / LOOK_SECONDS) == 0:
                await registry.sweep(settings.session_seconds)
                await sampling.sweep()
        except RollcallError as error:
            log.warning("nothing is cleared away just now: %s", error)


def _known(settings: Settings) -> Address | None:
    return shared_files.read_document(settings.address, Address)


def _remove(weights: Path, folder: str) -> None:
    """A checkpoint that nobody can name any more."""
    import shutil

    shutil.rmtree(weights / folder, ignore_errors=True)


def _stopped_by_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
