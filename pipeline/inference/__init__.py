"""The inference servers: code that runs inside vLLM, and the sync of weights from the trainer.

| module | owns |
|---|---|
| `vllm/` | the plugin and patches of vLLM, its middleware, the receiving ends of weight sync |
| `weight_sync/` | the trainer's side of weight sync, and the transports |

`vllm` imports `weight_sync`, never the reverse.
"""
