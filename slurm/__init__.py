"""The job: how it gets onto a cluster, or onto one machine, and what keeps it there.

| room | what is in it |
|---|---|
| `submission` | the commands of a user: submit, sweep, follow, cancel; Hydra's sweepers; the jobs of files |
| `monitor` | the terminal views of runs that live |
| `batch` | one job: its batch file, its executors, and what becomes of it after an attempt |
| `agent` | one rank: the agent, and the roles that it starts, watches and ends |
| `registry` | which runs and sweeps there are, and which job or launcher has each |
| `rendezvous` | how the ranks of an attempt find each other |
| `scheduler` | Slurm's commands and variables, behind a protocol |

A room imports those below it, and `pipeline`; never the reverse. `.importlinter` holds it.
"""
