"""The run directory: where each file lies, what the documents in it say, events, failures and metrics."""
