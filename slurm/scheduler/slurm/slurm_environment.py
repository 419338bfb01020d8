"""Slurm's environment variables: of a job and its tasks, and of Slurm's commands.

Owns their names. No module outside this package reads them.
"""

import os
from collections.abc import Mapping

from pipeline.utils.network_interfaces import candidate_addresses
from slurm.scheduler.rank_environment import COMMON_VARIABLES, Environment
from slurm.scheduler.scheduler_registry import outside_a_job

CLIENT_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"})
"""Variables with which Slurm's commands find their controller. They are not of a job, so every child keeps them."""

JOB_VARIABLES = ("SLURM_", "SLURMD_", "SRUN_", *COMMON_VARIABLES)
"""Prefixes of the variables that describe a job or a step."""

_DEFAULTS = ("SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_")
"""Prefixes of the variables that set options of Slurm's commands."""


def rank_environment(variables: Mapping[str, str]) -> Environment | None:
    """The rank that a process with these variables is; None outside a Slurm job."""
    attempt = job_attempt(variables)
    if attempt is None:
        return None
    job, restart = attempt
    return Environment(
        scheduler="slurm",
        job=job,
        restart=restart,
        rank=int(variables["SLURM_PROCID"]),
        ranks=int(variables["SLURM_NTASKS"]),
        addresses=candidate_addresses(),
        visible_gpus=variables.get("CUDA_VISIBLE_DEVICES", ""),
    )


def job_attempt(variables: Mapping[str, str]) -> tuple[str, int] | None:
    """Job id and restart count of the enclosing Slurm job; None outside a job. A heterogeneous job is its leader."""
    job = variables.get("SLURM_HET_JOB_ID") or variables.get("SLURM_JOB_ID")
    return None if job is None else (job, int(variables.get("SLURM_RESTART_COUNT", "0")))


def submission_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of Slurm's commands, without the variables of an enclosing job. sbatch passes it to the job.

    The user's defaults for these commands are removed too. Those of sbatch override the options of the batch file,
    which was shown and checked; those of the other commands change their output or effect.
    """
    return {name: value for name, value in outside_a_job(variables).items() if not name.startswith(_DEFAULTS)}
