"""What a user starts: submission, sweeps, what follows a job, and its cancellation."""
