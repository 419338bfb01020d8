"""The schedulers, one folder each, behind one protocol. No other package runs a scheduler's commands or reads its
variables.

| module | owns |
|---|---|
| `scheduler_protocol` | the operations of a scheduler, and the types of its answers |
| `scheduler_registry` | the schedulers by name, and the environment of this process by any of them |
| `rank_environment` | the environment of a rank, as its scheduler describes it |
| `allocation` | the nodes that a run asks a scheduler for |
| `slurm/` | Slurm |
| `local/` | virtual nodes on this machine |

Another scheduler is another folder, `slurm/scheduler/<name>/`, whose `__init__.py` has a `SCHEDULER` with the methods
of `BatchScheduler`. `cluster.scheduler=<name>` then selects it.
"""
