"""What every process needs of its machine: files, waiting, children, addresses, logs, heartbeats. Knows no run."""
