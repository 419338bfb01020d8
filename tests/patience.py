"""How long tests wait for other processes."""

WAIT_SECONDS = 240.0
"""Seconds. It bounds a hang; it must not decide a race on a busy machine."""
