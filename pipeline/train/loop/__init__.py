"""The training loop: one step of RL or SFT, its metrics, checkpoints, evaluations and weight publication."""
