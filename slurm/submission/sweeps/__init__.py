"""Hydra's sweepers as drivers of runs.

| module | owns |
|---|---|
| `run_sweeper` | one command from its overrides to the sweeper's end, with its output |
| `hydra_settings` | Hydra's part of a command line, and the keys of our launcher |
| `optuna_studies` | the storage of an Optuna study, and its resumption |
| `hydra_launcher` | the launcher plugin `hydra/launcher=rollcall` |
| `trial_batches` | a sweeper's batch of points: checked, started, awaited, measured |
| `sweep_jobs` | the job of one point, on this machine or in Slurm's queue |
| `sweep_metric` | a run's value of the objective |
"""
