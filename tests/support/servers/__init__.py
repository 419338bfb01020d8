"""Real servers for tests: Redis, vLLM, S3, and small ones with faults on demand."""
