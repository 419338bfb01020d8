"""The commands of a user: submission, sweeps, following a job, and cancellation.

| module | owns |
|---|---|
| `submit_run`, `submission_checks` | one run: planned and submitted; all checks before |
| `compose_config` | overrides to a config; a sweep to its points |
| `override_errors` | the errors of overrides that cannot be parsed or applied |
| `machine_resources` | `resources=machine`: roles sized by this machine |
| `size_cache` | the sizes of models, remembered across commands |
| `declined_options` | options and keys of Hydra and submitit that have another spelling here |
| `submission_warnings` | warnings and checks before a start |
| `tail_job` | a job from its submission to its end |
| `attach_servers`, `detach_servers` | servers that join a running run, in separate jobs; their end |
| `cancel_runs` | ending runs and sweeps from outside |
| `submit_sweep`, `sweep_trials` | many runs; each trial, prepared and claimed |
| `sweeps/` | Hydra's sweepers, driving runs |
| `train_files` | runs that execute job files |
| `serve_tinker`, `gateway_supervisor` | runs that serve the Tinker API; the supervisor of the gateway process |
| `usage_table` | the usage of each name on a serving run |
| `measure_goodput` | runs under faults, compared with an undisturbed one |
| `replay_run` | runs that train the recorded samples of another run |
| `evaluate_model` | runs that evaluate a checkpoint or a model directory |
| `local_job` | a run's job on this machine |
| `launcher_forks` | the fork server of a local run, from the checks on |
| `launcher_signals` | the signals that end a launcher |
"""
