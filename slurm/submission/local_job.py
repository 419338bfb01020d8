"""A run's job on this machine, for whoever started it.

Owns the start of such a job and its end from here. Promises that it is on record before it starts, that it comes down
in order once its trainer has made a checkpoint, however long that takes, and at once where that is asked for; and that
nothing is left of a checkpoint that it did not finish. The caller has claimed the run, and shows it.

    refuse_lacking_gpus(plan)
    with runs.claimed(config) as paths:
        follow_here(LocalJob(paths, config, plan), interrupted)
"""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from pipeline.checkpoints import remove_unfinished, root_of
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.config import RunConfig
from pipeline.errors import CheckpointError, ConfigError, PlanError
from pipeline.run.events import LAUNCHER, Events
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.topology.memory_fit import with_gpu_memory
from pipeline.topology.plan import Plan
from pipeline.utils.waiting import CLOCK
from slurm.agent.agent import Agent
from slurm.agent.gpu_locks import missing_gpus
from slurm.agent.preflight import GIB, find_gpus
from slurm.batch.executors import LocalNodesExecutor
from slurm.monitor.live_view import follow_run
from slurm.registry import run_registry
from slurm.scheduler.slurm.slurm_environment import gpus_of_user
from slurm.submission.launcher_signals import describe

_PAUSE = 0.1


def lacking_gpus(plan: Plan) -> str:
    """Why this machine has too few free GPUs for all virtual nodes; empty if it has enough."""
    return missing_gpus(gpus_of_user(), sum(seat.gpus for seat in plan.bundles))


def refuse_lacking_gpus(plan: Plan) -> None:
    """Raise `PlanError` if it has too few: before the run is claimed."""
    if lacking := lacking_gpus(plan):
        raise PlanError("cluster", "local", "a machine with enough free GPUs", lacking)


def check_shared_gpus(config: RunConfig, check: Callable[[RunConfig], None]) -> None:
    """`check` a config with the memory of this machine's smallest GPU, where servers share the trainer's and nobody
    said how much they have: two that do not fit find out only after minutes, one of them in the midst of an allocation.
    Its `ConfigError` says that the memory was measured."""
    if not config.resources.share_gpus or config.resources.gpu_memory:
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
            "others, and resources.gpu_memory what you know better",
        ) from None


class LocalJob:
    """A job of virtual nodes of `run`, which ends with this process. `attempt` is the one that it makes."""

    def __init__(self, paths: RunPaths, config: RunConfig, plan: Plan) -> None:
        print(f"{'starting' if run_registry.is_new(paths) else 'resuming'} {paths.root}", flush=True)
        self.run, self._config = paths, config
        self._executor = LocalNodesExecutor(paths, plan.ranks)
        run_registry.record_job(paths, "local", self._executor.job_name)
        self._job = self._executor.submit(Agent(paths.root))
        self.attempt: AttemptPaths = paths.attempt(run_registry.identity(paths).run_id, self._executor.attempt)

    def done(self) -> bool:
        """Whether all of it is over."""
        return self._job.done()

    def cancel(self, why: str) -> None:
        """Have it make a checkpoint, for as long as that takes, and come down; `why` is recorded as the reason."""
        try:
            Events(self.attempt).publish("draining", LAUNCHER, why, patient=True)
        except OSError:
            self._job.cancel()  # the agents then hear a signal, and have their grace

    def awaited(self) -> str:
        """What an end in order waits for, in one line."""
        rows = [row for row in read_rows(self.run.metrics) if row.get("attempt") == self.attempt.attempt]
        last = next((row for row in reversed(rows) if row["kind"] == "train"), {})
        measured = [
            f"the last {what} took {seconds:.0f} s"
            for what, name in (("step", "seconds/step"), ("checkpoint", "checkpoint/seconds"))
            if (seconds := last.get(name)) is not None
        ]
        known = f" ({', '.join(measured)})" if measured else ""
        return f"waiting for the trainer to end its step and make a checkpoint{known}, however long that takes"

    def end(self, at_once: Callable[[], bool] = lambda: False) -> None:
        """Wait until it is over; from `at_once()` on it is killed.

        There is no deadline here: a step and its checkpoint take as long as they take, and a trainer that hangs in them
        is ended by its agent.
        """
        while not (self.done() or at_once()):
            CLOCK.sleep(_PAUSE)
        if not self.done():
            self._executor.kill()
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove what the attempt left of a checkpoint, if it is on this machine's disks: nobody may ever resume it."""
        with suppress(CheckpointError):
            root = root_of(self._config, self.run, self.attempt.run_id)
            if Storage(root).local:
                remove_unfinished(root, self.attempt.attempt, over=True)


def follow_here(job: LocalJob, interrupted: Sequence[signal.Signals]) -> None:
    """Show the job until it is over. The first signal in `interrupted` has it make a checkpoint and come down, which is
    waited for; a second one ends it at once."""
    asked = False

    def over() -> bool:
        nonlocal asked
        if interrupted and not asked and not job.done():
            asked = True
            job.cancel(describe(interrupted[0]))
            print(f"{interrupted[0].name}: {job.awaited()}", file=sys.stderr, flush=True)
            print("press Ctrl-C again to end it at once, back to its last checkpoint", file=sys.stderr, flush=True)
        return job.done() or len(interrupted) > 1

    follow_run(job.run.root, over, attempt=job.attempt.attempt)
    job.end(at_once=lambda: len(interrupted) > 1)
