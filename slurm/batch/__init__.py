"""One job: what is asked of the scheduler, what starts its agents, and what becomes of it after an attempt.

| module | owns |
|---|---|
| `executors` | submitit's executors, as one job of several agents |
| `site_checks` | what a submission asks the site before anything is queued |
| `local_controller` | of a local job, what slurmctld and srun are to a cluster's |
| `attempt_summary` | what an attempt left behind |
| `requeue` | from the facts to the decision, and the requeue itself |
"""
