"""wandb: whether metrics go there, and the process that takes them."""
