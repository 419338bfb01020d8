"""What a user starts: submission, sweeps, what follows a job, and its cancellation.

| module | owns |
|---|---|
| `submit_run` | one run: checked, planned, submitted |
| `compose_config` | overrides to a config; a sweep to its points |
| `declined_options` | options and keys of Hydra and submitit that are spelled otherwise here |
| `submission_warnings` | what may go wrong, said before a start |
| `tail_job` | a job from its submission to its end |
| `cancel_runs` | runs and sweeps, told to end |
| `submit_sweep`, `sweep_trials` | many runs; each point, prepared and claimed |
| `sweeps/` | Hydra's sweepers, driving runs |
| `train_files` | runs that do the jobs of files |
| `serve_tinker`, `gateway_supervisor` | runs that serve the Tinker API; the process that its clients talk to |
| `usage` | what each name used of such a run |
| `evaluate_model` | runs that evaluate a commit or a model directory |
| `local_job` | a run's job on this machine |
| `launcher_signals` | what asks a launcher to end |
"""
