"""Bounds of values in records. Imports nothing, since the small processes that run tasks check rewards too."""

MAX_REWARD = float(1 << 24)
"""The largest absolute reward: float32, the type of advantages, represents every integer up to 2**24 exactly."""
