"""The run directory: the path and format of each file, events, failures and metrics.

| module | owns |
|---|---|
| `paths` | every file name of a run |
| `run_documents` | the run's identity, its submitted job, its end |
| `completion` | whether the run is finished |
| `events` | the events of an attempt, each published once |
| `fault_plan`, `fault_moments` | the grammar of injected faults; their records |
| `joined_servers` | the servers that join a running attempt, and leave it |
| `first_failure` | the first failure of an attempt |
| `metrics_log` | where metrics are written |
"""
