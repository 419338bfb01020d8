"""Which runs and sweeps there are, and whose each one is.

| module | owns |
|---|---|
| `runs` | the runs, and the job that each belongs to |
| `contents` | what a submission finds and leaves in a run directory |
| `snapshot` | the copy of the code that every attempt of a run starts |
| `manifest` | sweeps and their points |
| `locks` | which launcher is at a run or a sweep |
"""
