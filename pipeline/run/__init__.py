"""The run directory: where each file lies, what the documents in it say, events, failures and metrics.

| module | owns |
|---|---|
| `paths` | every file name of a run |
| `run_documents` | who the run is, its job, its end |
| `completion` | whether the run is at its end |
| `events` | what happened in an attempt, told once |
| `first_failure` | the first failure of an attempt |
| `metrics_log` | where the numbers go |
"""
