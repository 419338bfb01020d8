"""What Rollcall asks of a scheduler, and Slurm as it answers. Nothing else runs its commands or reads its variables.

| module | owns |
|---|---|
| `scheduler_protocol` | what is asked, and what is answered |
| `slurm_commands` | Slurm's commands, and the reading of what they print |
| `slurm_environment` | Slurm's variables, and the environments of children |
"""
