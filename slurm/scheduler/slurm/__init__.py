"""Slurm as a scheduler.

| module | owns |
|---|---|
| `slurm_scheduler` | Slurm as a `BatchScheduler`: the submission of a batch file |
| `slurm_commands` | Slurm's other commands, and the parsing of their output |
| `slurm_environment` | Slurm's environment variables |
| `batch_file` | the batch file of a run |
"""

from slurm.scheduler.slurm.slurm_scheduler import SlurmScheduler

SCHEDULER = SlurmScheduler()
