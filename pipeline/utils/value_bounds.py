"""Bounds of values in records. Imports nothing, since the small processes that run tasks check rewards too."""

MAX_REWARD = float(1 << 24)
"""The largest reward by size: up to it float32, in which advantages are trained, tells whole numbers apart."""
