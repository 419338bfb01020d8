"""Serving the Tinker API: a gateway on this machine, and a job that trains and samples.

Owns the order of a start and the restarts of the job. Promises that the gateway, to which clients connect, outlives the
trainer: clients wait while the trainer is away (`slurm.submission.gateway_supervisor` monitors the gateway). The same
command continues an earlier one at the same address. With `cluster=local` the job ends with the launcher; a queued job
continues, and the next command connects to it.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.model_directory import initial_weights, located_bases, model_directory
from pipeline.errors import ConfigError, RollcallError
from pipeline.run.paths import RunPaths
from pipeline.tinker.gateway_settings import Address, Settings, address_file, settings_of
from pipeline.tinker.service_state import MAX_DELIVERIES
from pipeline.tinker.tinker_wire import protocol
from pipeline.train.service.random_base import base_digest, recorded_digest
from pipeline.utils import shared_files, subprocesses
from pipeline.utils.private_files import make_directory
from pipeline.utils.user_commands import user_command
from pipeline.utils.waiting import wait_for
from slurm.batch.executors import RunJob
from slurm.registry import run_registry
from slurm.scheduler.scheduler_registry import child_environment, connect_scheduler
from slurm.submission.compose_config import compose_config
from slurm.submission.gateway_supervisor import GatewaySupervisor
from slurm.submission.launcher_forks import launcher_forks
from slurm.submission.launcher_signals import recorded_signals
from slurm.submission.submission_checks import check_submission
from slurm.submission.submit_run import print_plan, run_here, submit_one
from slurm.submission.tail_job import follow_job, print_job
from slurm.submission.usage_table import print_usage

BASE_SECONDS = 600.0
SHORT_SECONDS, MAX_SHORT = 60.0, MAX_DELIVERIES + 2
"""After `MAX_SHORT` consecutive attempts shorter than `SHORT_SECONDS`, the trainer is not restarted. The bound exceeds
the deliveries of a request that crashes each attempt, so that only that request fails."""


def main(argv: Sequence[str]) -> int:
    """The exit code of `serve.py [--url|--usage] key=value …`."""
    try:
        overrides = [argument for argument in argv if argument not in ("--url", "--usage")]
        if unknown := [argument for argument in overrides if argument.startswith("-")]:
            raise ConfigError("option", unknown[0], "--url, --usage or --help", "everything else is set as key=value")
        config = compose_config([*overrides, "serve.enabled=true", "training.steps=0"])
        if "--url" in argv:
            return _print_address(RunPaths(config.directory.resolve()))
        if "--usage" in argv:
            return print_usage(_address(RunPaths(config.directory.resolve())))
        with launcher_forks(config):
            return serve(config)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def serve(config: RunConfig) -> int:
    """Check the config, start the gateway and the job, and follow the job to its end. Returns its last exit code."""
    protocol()
    config = with_base(config)
    paths = RunPaths(config.directory.resolve())
    live = _live_job(config, paths)
    if live is None:
        print_plan(config, check_submission(config))
    with start_gateway(config, paths):
        if config.cluster.on_this_machine:
            return _serve_here(config)
        with recorded_signals() as interrupted:
            if live is None:
                live = submit_one(config, check_submission(config))
                print_job(live)
            return follow_job(live, interrupted)


def with_base(config: RunConfig) -> RunConfig:
    """The config with base models on disk. A base with random weights is written once, next to the run's directory.

    `ConfigError` if an earlier command wrote that base for another model or seed: clients would get that model under
    the name of this one.
    """
    bases = located_bases(config.serve.bases, config.model)
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"bases": bases})})
    if initial_weights(config.model) == "pretrained":
        return config
    base, shape = config.output.resolve() / f"{config.name}-base", model_directory(config.model)
    if not (base / "config.json").is_file():
        _write_base(config, shape, base)
    elif recorded_digest(base) != base_digest(shape, config.seed):
        expected = f"a run whose base {base} is of model.path={config.model.path} and seed={config.seed}"
        raise ConfigError("name", config.name, expected, f"choose another name, such as name={config.name}-2")
    name = config.serve.base_name or Path(config.model.path).name
    model = config.model.model_copy(update={"path": str(base), "init": "pretrained"})
    named = config.serve.model_copy(update={"base_name": name})
    return config.model_copy(update={"model": model, "serve": named})


def _write_base(config: RunConfig, shape: Path, base: Path) -> None:
    base.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pipeline.train.service.random_base", str(shape), str(base), str(config.seed)]
    log = base.with_name(f"{base.name}.log")
    child = subprocesses.Child(command, log, child_environment({}))
    wait_for("a base with random weights", lambda: child.poll() is not None, BASE_SECONDS)
    if not (base / "config.json").is_file():
        raise ConfigError("model.path", config.model.path, "a model that transformers can build", f"see {log}")
    log.unlink()
    print(f"wrote a base with random weights: {base}", flush=True)


@contextmanager
def start_gateway(config: RunConfig, paths: RunPaths) -> Iterator[Address]:
    """Run the gateway during the block and print its address and key; `ConfigError` if it cannot start."""
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(model_directory(config.model))})}
    )
    settings = settings_of(config, paths.api)
    make_directory(paths.root, config.cluster.directory_mode)
    make_directory(paths.api)
    supervisor = GatewaySupervisor(settings, paths.api / "gateway.log")
    try:
        address = supervisor.start()
        _print_exports(address, settings)
        yield address
    finally:
        supervisor.stop()


def _serve_here(config: RunConfig) -> int:
    """Run the job on this machine. A failed job is restarted, unless `MAX_SHORT` short attempts failed in a row."""
    short = 0
    for restart in range(config.serve.restarts + 1):
        started = time.monotonic()
        try:
            code = run_here(config, check_submission(config))
        except RollcallError as error:  # a GPU may be taken meanwhile: clients wait
            if not restart:
                raise
            print(f"error: {error}", file=sys.stderr, flush=True)
            time.sleep(SHORT_SECONDS)
            code = 1
        if code != 1:
            return code
        short = short + 1 if time.monotonic() - started < SHORT_SECONDS else 0
        if short >= MAX_SHORT:
            print(
                f"the trainer failed {short} times in a row right after its start and is not restarted", file=sys.stderr
            )
            return code
        print("the trainer is restarted; clients wait meanwhile", file=sys.stderr, flush=True)
    return 1


def _live_job(config: RunConfig, paths: RunPaths) -> RunJob | None:
    """The run's live job in a queue, started by an earlier command; None if there is none."""
    if config.cluster.on_this_machine or not paths.run.exists():
        return None
    queue = connect_scheduler(config.cluster.scheduler)
    queued = run_registry.live_job(paths, queue)
    return None if queued is None else RunJob(paths.submitit, queued.id, run=paths, queue=queue)


def _print_address(paths: RunPaths) -> int:
    print(_exports(_address(paths), paths.api / "key"))
    return 0


def _address(paths: RunPaths) -> Address:
    """The recorded address of a run's gateway; `ConfigError` for a run that never served."""
    address = shared_files.read_document(address_file(paths.api), Address)
    if address is None:
        raise ConfigError("name", paths.root.name, "a run that serves", f"start it: {user_command('serve')} …")
    return address


def _print_exports(address: Address, settings: Settings) -> None:
    key = Path(settings.keys) if settings.keys else settings.own_key
    print(f"serving {settings.base_names[0]} at {address.url}", flush=True)
    if settings.keys:
        print(f"  export TINKER_BASE_URL={address.url}\n  keys: {key}", flush=True)
    else:
        print("\n".join(f"  {line}" for line in _exports(address, key).splitlines()), flush=True)


def _exports(address: Address, key: Path) -> str:
    lines = [f"export TINKER_BASE_URL={address.url}"]
    if key.exists():
        lines.append(f"export TINKER_API_KEY=$(cat {shlex.quote(str(key))})")
    return "\n".join(lines)
