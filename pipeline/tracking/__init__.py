"""wandb: whether metrics go there, and the process that takes them.

| module | owns |
|---|---|
| `metric_sinks` | whether metrics go to wandb, and the trainer's side of it |
| `wandb_process` | the process that hands them over |
"""
