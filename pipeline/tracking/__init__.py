"""Tracking with wandb: the choice of its mode, and the process that logs metrics to it.

| module | owns |
|---|---|
| `metric_sinks` | the choice of wandb's mode, and the trainer's side |
| `wandb_process` | the process that follows `metrics.jsonl` and logs to wandb |
"""
