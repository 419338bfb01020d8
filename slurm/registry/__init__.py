"""The runs and sweeps on disk, and the job or launcher that owns each.

| module | owns |
|---|---|
| `run_registry` | the claim on a run, and the run's job |
| `attached_jobs` | the jobs that serve a run in addition to its own |
| `run_contents` | the content of a run directory before its job starts |
| `code_snapshot` | the copy of the code that every attempt of a run executes |
| `sweep_manifest` | sweeps and their points |
| `file_locks` | locks on runs and sweeps |
"""
