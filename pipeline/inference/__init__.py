"""The inference servers: the engines that serve, and the sync of weights from the trainer.

| module | owns |
|---|---|
| `engine_protocol` | what an inference engine must offer, and the HTTP routes of its servers |
| `engine_registry` | the engines, by name |
| `vllm/` | vLLM as an engine: its plugin, patches and middleware, the receiving ends of weight sync |
| `weight_sync/` | the trainer's side of weight sync, and the transports |

An engine is a folder `<name>/` with a module `<name>_engine`. It imports `weight_sync`, never the reverse.
"""
