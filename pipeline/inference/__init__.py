"""The inference servers, as the rest of a run sees them: `vllm` is the code that runs inside vLLM, `weight_sync` brings
the
trainer's weights to the servers."""
