"""Slurm as a scheduler.

| module | owns |
|---|---|
| `slurm_scheduler` | Slurm as a `BatchScheduler`: the submission of a batch file |
| `slurm_commands` | Slurm's other commands, and the parsing of their output |
| `slurm_environment` | Slurm's environment variables |
| `batch_file` | the batch file of a run |
| `container_command` | the words of the batch file that start an agent in a container, and its mounts |
| `container_start` | the start of a container on a node, by the host's Python |
| `container_entry` | the first process in a container, by the image's Python |
"""

from slurm.scheduler.slurm.slurm_scheduler import SlurmScheduler

SCHEDULER = SlurmScheduler()
