"""Which runs and sweeps there are, and whose each one is."""
