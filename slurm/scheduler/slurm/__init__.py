"""Slurm: its commands, its environment variables, its batch file."""
