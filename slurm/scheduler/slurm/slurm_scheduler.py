"""Slurm as a `BatchScheduler`.

Owns the submission of a batch file with sbatch. The other modules of this package own the commands, the variables and
the text of the file.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import ConfigError, SchedulerError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from slurm.scheduler.rank_environment import Environment
from slurm.scheduler.scheduler_protocol import CALL_SECONDS, SUBMIT_SECONDS, SchedulerSilent
from slurm.scheduler.slurm.batch_file import batch_file
from slurm.scheduler.slurm.slurm_commands import COMMANDS, NO_ANSWER, SlurmCommands
from slurm.scheduler.slurm.slurm_environment import (
    CLIENT_VARIABLES,
    JOB_VARIABLES,
    job_attempt,
    rank_environment,
    submission_environment,
)


class SlurmScheduler:
    """Slurm, as a `slurm.scheduler.scheduler_protocol.BatchScheduler`."""

    title = "Slurm"
    kill_settings = ("KillWait", "GraceTime")
    job_variables = JOB_VARIABLES
    client_variables = CLIENT_VARIABLES

    def environment(self, variables: Mapping[str, str]) -> Environment | None:
        return rank_environment(variables)

    def batch_attempt(self, variables: Mapping[str, str]) -> tuple[str, int] | None:
        return job_attempt(variables)

    def queue(self, seconds: float = CALL_SECONDS) -> SlurmCommands:
        return SlurmCommands(seconds)

    def require_commands(self) -> None:
        missing = [name for name in COMMANDS if shutil.which(name) is None]
        if missing:
            hint = f"{', '.join(missing)} not found: log in to a node of the cluster, or set cluster=local"
            raise ConfigError("cluster.scheduler", "slurm", "Slurm's commands on PATH", hint)

    def batch_file(
        self, config: RunConfig, plan: Plan, run: RunPaths, *, run_id: str, folder: Path, python: str, command: str
    ) -> str:
        return batch_file(config, plan, run, run_id=run_id, folder=folder, python=python, command=command)

    def submit(self, batch_file: Path) -> str:
        output = _sbatch(batch_file)
        match = re.search(r"Submitted batch job (\d+)", output)
        if match is None:
            raise SchedulerSilent(f"sbatch named no job: {_one_line(output)}")
        return match.group(1)

    def behind(self, cluster: ClusterConfig, job: str) -> ClusterConfig:
        return cluster.model_copy(update={"sbatch": cluster.sbatch | {"dependency": f"afterany:{job}"}})


def _sbatch(file: Path) -> str:
    """Run sbatch. Returns its output; `SchedulerError` if it refused the file, `SchedulerSilent` without an answer."""
    try:
        done = subprocess.run(
            ["sbatch", str(file)],
            env=submission_environment(),
            capture_output=True,
            text=True,
            errors="replace",  # a site's plugin may write in any encoding, also about a job that is queued
            timeout=SUBMIT_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C must not reach it between queueing and answering
        )
    except FileNotFoundError as error:
        raise SchedulerError("sbatch is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerSilent(f"sbatch gave no answer in {SUBMIT_SECONDS:g} s") from error
    if done.returncode and NO_ANSWER.search(done.stderr):
        raise SchedulerSilent(f"sbatch got no answer: {_one_line(done.stderr)}")
    if done.returncode:
        raise SchedulerError(f"sbatch refused the job: {_one_line(done.stderr)}")
    return done.stdout


def _one_line(output: str) -> str:
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in output.strip().splitlines())
