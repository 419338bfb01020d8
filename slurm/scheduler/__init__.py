"""The protocol of a scheduler, and its implementations. No other package runs a scheduler's commands.

| module | owns |
|---|---|
| `scheduler_protocol` | the operations of a scheduler, and the types of its answers |
| `slurm/` | Slurm |
"""
