"""A third scheduler, as small as the protocol allows: it shows what another folder of `slurm.scheduler` must have.

`tests/protocol/test_another_scheduler.py` copies this folder into a copy of the packages. Its jobs are real processes
of this machine, which `spool.py` starts, lists and signals. One rank is one process.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import ConfigError, SchedulerError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from slurm.scheduler.rank_environment import COMMON_VARIABLES, Environment
from slurm.scheduler.scheduler_protocol import SUBMIT_SECONDS, Nodes, Partition, QueuedJob, SchedulerSilent

HOME = "SPOOL_HOME"
COMMAND = [sys.executable, str(Path(__file__).with_name("spool.py"))]


class SpoolQueue:
    """A `JobQueue`: one command for each operation."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def job(self, job: str) -> QueuedJob | None:
        return self._jobs().get(job)

    def jobs_with(self, word: str) -> list[QueuedJob]:
        return [job for job in self._jobs().values() if job.live and word in job.comment.split()]

    def known(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        return {job: queued for job, queued in self._jobs().items() if job in ids}

    def partitions(self) -> list[Partition]:
        return [Partition("all", default=True, up=True, nodes=4, gpus="", time_limit="infinite", kinds=(Nodes(4),))]

    def accounts(self) -> list[str] | None:
        return None

    def kill_wait(self) -> int:
        return 600

    def test_only(self, batch_file: Path, *, nodes_down: bool = False) -> str:
        return "" if batch_file.read_text().startswith("#!/bin/bash\n#SPOOL ") else "no #SPOOL line"

    def requeue(self, job: str) -> None:
        spool("requeue", job, seconds=self._seconds)

    def cancel(self, job: str) -> None:
        spool("cancel", job, seconds=self._seconds)

    def _jobs(self) -> dict[str, QueuedJob]:
        rows = [line.split("|") for line in spool("list", seconds=self._seconds).splitlines()]
        return {
            job: QueuedJob(job, name, user, state, restarts=int(restarts), comment=comment)
            for job, name, user, state, restarts, comment in rows
        }


class SpoolScheduler:
    """A `BatchScheduler`."""

    title = "Spool"
    kill_settings = ("patience",)
    job_variables = ("SPOOL_", *COMMON_VARIABLES)
    client_variables = frozenset({HOME})

    def environment(self, variables: Mapping[str, str]) -> Environment | None:
        attempt = self.batch_attempt(variables)
        if attempt is None:
            return None
        job, restart = attempt
        rank, ranks = int(variables["SPOOL_RANK"]), int(variables["SPOOL_RANKS"])
        return Environment("spool", job, restart, rank, ranks, addresses=("127.0.0.1",), visible_gpus="")

    def batch_attempt(self, variables: Mapping[str, str]) -> tuple[str, int] | None:
        return (variables["SPOOL_JOB"], int(variables["SPOOL_RESTARTS"])) if "SPOOL_JOB" in variables else None

    def queue(self, seconds: float) -> SpoolQueue:
        return SpoolQueue(seconds)

    def require_commands(self) -> None:
        if HOME not in os.environ:
            raise ConfigError("cluster.scheduler", "spool", f"a machine with {HOME}", "log in to one")

    def batch_file(
        self, config: RunConfig, plan: Plan, run: RunPaths, *, run_id: str, folder: Path, python: str, command: str
    ) -> str:
        quoted, interpreter = shlex.quote(str(folder)), shlex.quote(python)
        return f"""#!/bin/bash
#SPOOL {config.name}|rollcall {run_id}|{config.cluster.sbatch.get("after", "")}
export PYTHONPATH={shlex.quote(str(run.code))} PYTHONSAFEPATH=1
export SUBMITIT_EXECUTOR=local SUBMITIT_LOCAL_JOB_ID=$SPOOL_JOB SPOOL_RANKS={plan.ranks}
trap : TERM USR1 USR2
for rank in $(seq 0 $((SPOOL_RANKS - 1))); do
  SPOOL_RANK=$rank SUBMITIT_LOCAL_GLOBALID=$rank {command} >>{quoted}/${{SPOOL_JOB}}_${{rank}}_log.out 2>&1 &
  agents+=($!)
done
code=0
for agent in ${{agents[@]}}; do
  while kill -0 $agent 2>/dev/null; do wait $agent; ended=$?; done
  [ $ended = 0 ] || code=$ended
done
trap '' TERM USR1 USR2
{interpreter} -P -m slurm.batch.requeue {shlex.quote(str(run.root))} "$code"
exit $?
"""

    def submit(self, batch_file: Path) -> str:
        job = spool("submit", str(batch_file), seconds=SUBMIT_SECONDS).strip()
        if not job.isdecimal():
            raise SchedulerSilent(f"spool named no job: {job!r}")
        return job

    def behind(self, cluster: ClusterConfig, job: str) -> ClusterConfig:
        return cluster.model_copy(update={"sbatch": {"after": job}})


def spool(*arguments: str, seconds: float) -> str:
    """The output of the command; `SchedulerError` if it fails."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise SchedulerError(f"spool {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


SCHEDULER = SpoolScheduler()
