"""A run's job on this machine, from the launcher's side.

Owns the start of such a job and its end on request. Promises that the job is on record before it starts, that it shuts
down in order once its trainer has saved a checkpoint, without a time limit, or at once if requested, and that an
unfinished checkpoint is removed. The caller has claimed the run and displays it.

    refuse_lacking_gpus(plan)
    with runs.claimed(config) as paths:
        follow_here(LocalJob(paths, config, plan), interrupted)
"""

import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from pipeline.checkpoints import remove_unfinished, root_of
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.config import RunConfig
from pipeline.errors import CheckpointError, ConfigError, PlanError
from pipeline.inference.engine_registry import find_engine
from pipeline.run.events import LAUNCHER, Events
from pipeline.run.metrics_log import MetricRecord, read_rows
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import LOCAL
from pipeline.topology.memory_fit import with_gpu_memory
from pipeline.topology.plan import Plan
from pipeline.utils.waiting import CLOCK
from slurm.agent.agent import Agent
from slurm.agent.gpu_locks import missing_gpus
from slurm.agent.preflight import GIB, MPS_PROGRAM, find_gpus
from slurm.batch.executors import LocalNodesExecutor
from slurm.monitor.live_view import follow_run
from slurm.registry import run_registry
from slurm.scheduler.local.local_environment import gpus_of_user
from slurm.submission.launcher_signals import describe

_PAUSE = 0.1


def lacking_gpus(plan: Plan) -> str:
    """Why this machine has too few free GPUs for all virtual nodes; empty if it has enough."""
    return missing_gpus(gpus_of_user(), sum(bundle.gpus for bundle in plan.bundles))


def refuse_lacking_gpus(plan: Plan) -> None:
    """Raise `PlanError` if this machine has too few free GPUs. Called before the run is claimed."""
    if lacking := lacking_gpus(plan):
        raise PlanError("cluster", LOCAL, "a machine with enough free GPUs", lacking)


def check_shared_gpus(config: RunConfig, check: Callable[[RunConfig], None]) -> None:
    """Apply `check` to a colocated config with the memory of this machine's smallest GPU.

    Does nothing if the config sets `resources.gpu_memory`. Without this check, a trainer and a server that do not fit
    on one GPU fail after minutes, one of them within an allocation. The `ConfigError` notes that the memory was
    measured.
    """
    if not config.resources.colocate or config.resources.gpu_memory:
        return
    known = [gpu.total for gpu in find_gpus(gpus_of_user()) if gpu.total]
    if not known:
        return
    try:
        check(with_gpu_memory(config, min(known)))
    except ConfigError as error:
        raise ConfigError(
            error.key,
            error.value,
            error.expected,
            f"{error.hint}. This machine's smallest GPU has {min(known) / GIB:.1f} GiB; CUDA_VISIBLE_DEVICES can name "
            "others, and resources.gpu_memory replaces the measured value",
        ) from None


def check_mps(config: RunConfig) -> None:
    """Raise `ConfigError` if the run needs the Multi-Process Service and this machine lacks its program."""
    if config.resources.needs_mps and shutil.which(MPS_PROGRAM) is None:
        expected = f"false on a machine without {MPS_PROGRAM}, a part of NVIDIA's driver"
        raise ConfigError(
            "resources.mps", True, expected, "set resources.mps=false, or add the program's folder to PATH"
        )


def check_server_gpus(config: RunConfig) -> None:
    """Raise `ConfigError` if servers can run on none of this machine's GPUs, for the reason of the last one.

    A server's start checks its own GPUs. Only quantization depends on them, so nothing is measured without it.
    """
    if config.resources.device != "cuda" or config.inference.quantization == "none":
        return
    engine, refusal = find_engine(config.inference.engine), None
    for gpu in find_gpus(gpus_of_user()):
        try:
            engine.check_gpus(config, [gpu.index])
        except ConfigError as error:
            refusal = error
        else:
            return
    if refusal is not None:
        raise refusal


class LocalJob:
    """A job of virtual nodes that executes one attempt of `run`, and ends with this process."""

    def __init__(self, paths: RunPaths, config: RunConfig, plan: Plan) -> None:
        print(f"{'starting' if run_registry.is_new(paths) else 'resuming'} {paths.root}", flush=True)
        self.run, self._config = paths, config
        self._executor = LocalNodesExecutor(paths, plan.ranks)
        run_registry.record_job(paths, LOCAL, self._executor.job_name)
        self._job = self._executor.submit(Agent(paths.root))
        self.attempt: AttemptPaths = paths.attempt(run_registry.identity(paths).run_id, self._executor.attempt)

    def done(self) -> bool:
        """Whether all virtual nodes have ended."""
        return self._job.done()

    def cancel(self, why: str) -> None:
        """Make the job save a checkpoint, without a time limit, and end; `why` is recorded as the reason."""
        try:
            Events(self.attempt).publish("draining", LAUNCHER, why, patient=True)
        except OSError:
            self._job.cancel()  # without a disk for the event, the agents get a signal and their grace time

    def awaited(self) -> str:
        """One line that explains the wait for an orderly end, with the last measured durations."""
        rows = list[MetricRecord]()
        with suppress(OSError):  # the job drains, whether the disk has the durations or not
            rows = [row for row in read_rows(self.run.metrics) if row.get("attempt") == self.attempt.attempt]
        last = next((row for row in reversed(rows) if row["kind"] == "train"), {})
        measured = [
            f"the last {what} took {seconds:.0f} s"
            for what, name in (("step", "seconds/step"), ("checkpoint", "checkpoint/seconds"))
            if (seconds := last.get(name)) is not None
        ]
        durations = f" ({', '.join(measured)})" if measured else ""
        return f"waiting for the trainer to end its step and save a checkpoint{durations}, without a time limit"

    def end(self, at_once: Callable[[], bool] = lambda: False) -> None:
        """Wait until the job is over; kill it once `at_once()` is true.

        There is no deadline here, since a step and its checkpoint have no bound. The agent's watchdog ends a trainer
        that hangs in them.
        """
        while not (self.done() or at_once()):
            CLOCK.sleep(_PAUSE)
        if not self.done():
            self._executor.kill()
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove the attempt's unfinished checkpoint if it is on a local disk: the run may never be resumed."""
        with suppress(CheckpointError):
            root = root_of(self._config, self.run, self.attempt.run_id)
            if Storage(root).local:
                remove_unfinished(root, self.attempt.attempt, over=True)


def follow_here(job: LocalJob, interrupted: Sequence[signal.Signals]) -> None:
    """Show the job until it is over.

    The first signal in `interrupted` makes the job save a checkpoint and shut down, and this function waits for that. A
    second signal ends the job at once.
    """
    is_cancelled = False

    def over() -> bool:
        nonlocal is_cancelled
        if interrupted and not is_cancelled and not job.done():
            is_cancelled = True
            job.cancel(describe(interrupted[0]))
            print(f"{interrupted[0].name}: {job.awaited()}", file=sys.stderr, flush=True)
            print(
                "press Ctrl-C again to end it at once, which loses the steps since its last checkpoint",
                file=sys.stderr,
                flush=True,
            )
        return job.done() or len(interrupted) > 1

    follow_run(job.run.root, over, attempt=job.attempt.attempt)
    job.end(at_once=lambda: len(interrupted) > 1)
