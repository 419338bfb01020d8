"""What Rollcall asks of a scheduler, and Slurm as it answers. Nothing else runs its commands or reads its variables."""
