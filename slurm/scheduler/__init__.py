"""What Rollcall asks of a scheduler, and Slurm as it answers. Nothing else runs its commands or reads its variables.

| module | owns |
|---|---|
| `protocol` | what is asked, and what is answered |
| `commands` | Slurm's commands, and the reading of what they print |
| `environment` | Slurm's variables, and the environments of children |
"""
