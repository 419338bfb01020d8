"""Virtual nodes on this machine, as a scheduler without a queue: a job ends with its launcher.

| module | owns |
|---|---|
| `local_environment` | the variables of a local job, and the addresses of its virtual nodes |

`slurm.batch.local_controller` starts the agents of a local job, and `slurm.submission.local_job` starts the controller.
"""

from slurm.scheduler.local.local_environment import LocalScheduler

SCHEDULER = LocalScheduler()
