"""What a user starts: submission, sweeps, what follows a job, and its cancellation.

| module | owns |
|---|---|
| `submit` | one run: checked, planned, submitted |
| `compose` | overrides to a config; a sweep to its points |
| `declined` | options and keys of Hydra and submitit that are spelled otherwise here |
| `advice` | what may go wrong, said before a start |
| `following` | a job from its submission to its end |
| `cancel` | runs and sweeps, told to end |
| `sweep`, `points` | many runs; each point, prepared and claimed |
| `sweepers/` | Hydra's sweepers, driving runs |
| `train` | runs that do the jobs of files |
| `serve`, `front` | runs that serve the Tinker API; the process that its clients talk to |
| `evaluate` | runs that evaluate a commit or a model directory |
| `here` | a run's job on this machine |
| `signals` | what asks a launcher to end |
"""
