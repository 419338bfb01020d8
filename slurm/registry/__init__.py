"""Which runs and sweeps there are, and whose each one is.

| module | owns |
|---|---|
| `run_registry` | the runs, and the job that each belongs to |
| `run_contents` | what a submission finds and leaves in a run directory |
| `code_snapshot` | the copy of the code that every attempt of a run starts |
| `sweep_manifest` | sweeps and their points |
| `file_locks` | which launcher is at a run or a sweep |
"""
