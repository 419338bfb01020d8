"""The run directory: the path and format of each file, events, failures and metrics.

| module | owns |
|---|---|
| `paths` | every file name of a run |
| `run_documents` | the run's identity, its submitted job, its end |
| `completion` | whether the run is finished |
| `events` | the events of an attempt, each published once |
| `poll_rates` | how often processes access the shared file system, by the number of ranks |
| `fault_plan`, `fault_moments` | the grammar of injected faults; their records |
| `joined_servers` | the servers that join a running attempt, and leave it |
| `fault_conditions` | injected faults of files and network, for all processes of an attempt |
| `first_failure` | the first failure of an attempt |
| `metrics_log`, `metric_names` | where metrics are written; the names of the run's own |
| `transitions` | the timeline of roles, by rank |
| `lost_seconds`, `goodput_records` | the useful part of a run's wall time and what took the rest; its records |
| `notices` | what happened in an attempt and did not end it, for people |
"""
