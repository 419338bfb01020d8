"""Slurm as a scheduler.

| module | owns |
|---|---|
| `slurm_commands` | Slurm's commands, and the parsing of their output |
| `slurm_environment` | Slurm's environment variables, and the environments of children |
| `batch_file` | the batch file of a run |
"""
