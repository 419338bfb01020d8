"""Tasks and reward functions that do whatever can be done wrong."""
