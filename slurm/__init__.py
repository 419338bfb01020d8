"""The scheduler's job of a run: its submission, its agents, and its requeue, on a cluster or on one machine.

| room | owns |
|---|---|
| `submission` | the commands of a user: submit, sweep, follow, cancel; Hydra's sweepers; job files |
| `monitor` | the terminal views of live runs |
| `batch` | one job: its checks, its executors, and the decision after an attempt |
| `agent` | one rank: the agent, and the roles that it starts, monitors and stops |
| `registry` | the runs and sweeps on disk, and the job or launcher that owns each |
| `rendezvous` | the rendezvous of an attempt's ranks |
| `scheduler` | the schedulers, one folder each: their commands and variables, behind a protocol |

A room imports rooms below it, and `pipeline`; never the reverse. `.importlinter` checks this.
"""
