"""What Rollcall asks of a scheduler, and the schedulers that answer. Nothing else runs their commands.

| module | owns |
|---|---|
| `scheduler_protocol` | what is asked, and what is answered |
| `slurm/` | Slurm |
"""
