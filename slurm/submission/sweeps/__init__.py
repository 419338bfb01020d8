"""Hydra's sweepers, driving runs of ours.

| module | what is in it |
|---|---|
| `run_sweeper` | one command from its overrides to the sweeper's end, and what is said of it |
| `hydra_settings` | what of a command line is Hydra's, and what its launcher is told |
| `optuna_studies` | what an Optuna study needs beside: where it is kept, and how it is taken up again |
| `hydra_launcher` | the launcher plugin, which Hydra finds as `hydra/launcher=rollcall` |
| `trial_batches` | the points that a sweeper asks for at a time: looked at, started, awaited, measured |
| `sweep_jobs` | the job of one such point, on this machine or in Slurm's queue |
| `sweep_metric` | the number that a run has reached |
"""
