"""Submitting a run: check everything, show the plan, start one job, follow it.

Owns the order of a submission. Promises that nothing is started and nothing queued unless the whole input is right, and
that the launcher's exit code is the run's: 0 finished, 1 failed, 2 wrong input, 130 or 143 interrupted (the run can be
resumed by the same command).
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from pipeline import files
from pipeline.assignment import describe
from pipeline.checkpoints import newest_committed
from pipeline.checks import check_config
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RollcallError
from pipeline.events import Events
from pipeline.failure import FirstFailure
from pipeline.models import longest_sequence
from pipeline.paths import AttemptPaths, RunPaths
from pipeline.plan import Plan, make_plan
from pipeline.records import Finished
from pipeline.report.history import read_history
from pipeline.report.page import write_report
from pipeline.roles.inference import find_vllm
from pipeline.roles.redis import find_server
from pipeline.tasks import check_task, load_task
from pipeline.waiting import wait_for
from slurm import runs
from slurm.agent import Agent
from slurm.compose import compose_config
from slurm.executors import VirtualNodes
from slurm.supervisor import longest_descent
from slurm.view import follow

INTERRUPTS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}

_SLACK_SECONDS = 20.0
"""How much longer than its agents a job may take to come down."""


def main(argv: Sequence[str]) -> int:
    """The exit code of a submission with these command-line arguments."""
    try:
        options, overrides = _read(argv)
        config = compose_config(overrides)
        if options.cfg:
            print(config.model_dump_json(indent=2))
            return 0
        plan = check(config)
        print_plan(config, plan)
        return 0 if options.dry_run else run(config, plan)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options and overrides; `ConfigError` for an option there is not."""
    expected = "one of --cfg, --dry-run, --help"
    try:
        options, overrides = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("option", " ".join(argv), expected, str(error)) from None
    unknown = [argument for argument in overrides if argument.startswith("-")]
    if unknown:
        raise ConfigError("option", unknown[0], expected, "everything else is set as key=value")
    if options.cfg and "job" in overrides:  # Hydra's form is `--cfg job`
        overrides.remove("job")
    return options, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launchers/submit.py",
        description="Submit one run: python launchers/submit.py experiment=demo cluster=local key=value …",
        epilog="Run the same command again to resume an interrupted run. Keys: docs/configuration.md.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--cfg", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; start nothing")
    return parser


def check(config: RunConfig) -> Plan:
    """The plan of a config that can run here; `ConfigError` for the first thing that stands in its way."""
    check_config(config, longest_sequence(config.model))
    plan = make_plan(config)
    check_task(load_task(config.task, config.seed), config.task.name, config.training.warm_start.steps)
    find_vllm()
    if config.streams.backend == "redis":
        find_server()
    runs.examine(config)
    return plan


def print_plan(config: RunConfig, plan: Plan) -> None:
    """Which role goes where, before anything is started."""
    console = Console(highlight=False)
    console.print(f"[bold]{config.name}[/]  {config.task.name}, {config.loss.name}, {config.training.steps} steps")
    for line in describe(plan):
        console.print(f"  {line}")


def run(config: RunConfig, plan: Plan) -> int:
    """Start the job, follow it until it ended, and return its exit code."""
    with runs.claimed(config) as paths, interrupts() as interrupted:
        print(f"{'starting' if runs.is_new(paths) else 'resuming'} {paths.root}", flush=True)
        executor = VirtualNodes(paths, plan.ranks)
        job = executor.submit(Agent(paths.root))
        follow(paths.root, lambda: job.done() or bool(interrupted), attempt=executor.attempt)
        if interrupted:
            print(f"{interrupted[0].name}: committing and stopping …", file=sys.stderr, flush=True)
            job.cancel()
            print("press Ctrl-C again to end it at once", file=sys.stderr, flush=True)
        most = longest_descent(config.cluster) + _SLACK_SECONDS
        wait_for("the job to end", lambda: job.done() or len(interrupted) > 1, most)
        if not job.done():
            executor.kill()
        attempt = paths.attempt(runs.identity(paths).run_id, executor.attempt)
        return conclude(paths, attempt, interrupted)


@contextmanager
def interrupts() -> Iterator[list[signal.Signals]]:
    """Collects the signals that ask the launcher to end, instead of ending it.

    A hang-up that was ignored before, as `nohup` does, stays ignored.
    """
    received: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    wanted = [number for number in INTERRUPTS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def conclude(paths: RunPaths, attempt: AttemptPaths, interrupted: Sequence[signal.Signals]) -> int:
    """Say how the run ended and where to look, then write the report; the exit code, which a report cannot change."""
    code = _tell_end(paths, attempt, interrupted)
    try:
        print(f"  report      {write_report(read_history(paths.root))}", flush=True)
    except Exception as error:  # noqa: BLE001 (how the run ended is told, whatever the report does)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: the report could not be written: {reason}", file=sys.stderr)
    return code


def _tell_end(paths: RunPaths, attempt: AttemptPaths, interrupted: Sequence[signal.Signals]) -> int:
    finished = files.read_document(paths.finished, Finished)
    if finished is not None:
        print(f"finished {finished.steps} steps\n  metrics     {paths.metrics}")
        print(f"  checkpoint  {newest_committed(str(paths.checkpoints))}\n  model       {paths.model}", flush=True)
        return 0
    failure = files.read_document(attempt.first_failure, FirstFailure)
    if failure is not None:
        print(f"failed: {failure.one_line()}\n  {attempt.first_failure}", file=sys.stderr)
        return 1
    if interrupted:
        checkpoint = newest_committed(str(paths.checkpoints))
        again = f"resumes it from {checkpoint}" if checkpoint else "starts it over, since it had no checkpoint yet"
        print(f"interrupted; the same command {again}", file=sys.stderr)
        return INTERRUPTS[interrupted[0]]
    draining = Events(attempt).seen("draining")
    if draining is not None:
        print(
            f"interrupted: {draining.by} was told to end ({draining.detail}); the same command resumes it",
            file=sys.stderr,
        )
        return INTERRUPTS[signal.SIGTERM]
    print(f"failed: the job ended without a reason; see its output in {paths.submitit}", file=sys.stderr)
    return 1
