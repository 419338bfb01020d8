"""wandb: whether metrics go there, and the process that takes them.

| module | owns |
|---|---|
| `sinks` | whether metrics go to wandb, and the trainer's side of it |
| `process` | the process that hands them over |
"""
