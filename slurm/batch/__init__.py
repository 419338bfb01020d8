"""One job: its submission, the start of its agents, and the decision after each attempt.

| module | owns |
|---|---|
| `executors` | submitit's executors, as one job of several agents |
| `site_checks` | a submission's checks of the site before anything is queued |
| `local_controller` | the controller of a local job, in place of a scheduler's |
| `attempt_summary` | the records of an ended attempt |
| `container_failure` | the reason why the agents of an attempt had no container |
| `requeue` | the decision after an attempt, and the requeue |
"""
