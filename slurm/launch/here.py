"""A run's job on this machine, for whoever started it.

Owns the start of such a job and its end from here. Promises that it is on record before it starts, that it comes down
in order within a deadline, and at once where that is asked for. The caller has claimed the run, and shows it.

    refuse_lacking_gpus(plan)
    with runs.claimed(config) as paths:
        job = JobHere(paths, config, plan)
        …                                   until job.done(), or job.cancel()
        job.end()
"""

from collections.abc import Callable

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, PlanError
from pipeline.rundir.paths import AttemptPaths, RunPaths
from pipeline.system.waiting import wait_for
from pipeline.world.memory import on_gpus_of
from pipeline.world.plan import Plan
from slurm.batch.executors import VirtualNodes
from slurm.node.agent import Agent
from slurm.node.claims import missing_gpus
from slurm.node.preflight import GIB, find_gpus
from slurm.node.supervisor import longest_descent
from slurm.registry import runs
from slurm.scheduler.environment import gpus_of_user

_SLACK_SECONDS = 20.0
"""How much longer than its agents a job may take to come down."""


def lacking_gpus(plan: Plan) -> str:
    """Why this machine has too few free GPUs for all virtual nodes; empty if it has enough."""
    return missing_gpus(gpus_of_user(), sum(seat.gpus for seat in plan.seats))


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
        check(on_gpus_of(config, min(known)))
    except ConfigError as error:
        raise ConfigError(
            error.key,
            error.value,
            error.expected,
            f"{error.mend}. This machine's smallest GPU has {min(known) / GIB:.1f} GiB; CUDA_VISIBLE_DEVICES can name "
            "others, and resources.gpu_memory what you know better",
        ) from None


class JobHere:
    """A job of virtual nodes, which ends with this process. `attempt` is the one that it makes."""

    def __init__(self, paths: RunPaths, config: RunConfig, plan: Plan) -> None:
        print(f"{'starting' if runs.is_new(paths) else 'resuming'} {paths.root}", flush=True)
        self._most = longest_descent(config.cluster) + _SLACK_SECONDS
        self._executor = VirtualNodes(paths, plan.ranks)
        runs.record_job(paths, "local", self._executor.job_name)
        self._job = self._executor.submit(Agent(paths.root))
        self.attempt: AttemptPaths = paths.attempt(runs.identity(paths).run_id, self._executor.attempt)

    def done(self) -> bool:
        """Whether all of it is over."""
        return self._job.done()

    def cancel(self) -> None:
        """Have it commit and come down."""
        self._job.cancel()

    def end(self, at_once: Callable[[], bool] = lambda: False) -> None:
        """Wait until it is over, as long as it may take to come down; from `at_once()` on it is killed."""
        wait_for("the job to end", lambda: self.done() or at_once(), self._most)
        if not self.done():
            self._executor.kill()
