"""Weights from the trainer to the vLLM servers.

| module | owns |
|---|---|
| `weight_sender`, `server_sync` | every server kept at the trainer's newest weights; the way to one of them |
| `server_admin_client` | the HTTP routes that pause a server and change its weights |
| `gloo` | weights over TCP, through a store |
| `weight_snapshot`, `server_shards` | a version where it waits; what a process needs of it, in chunks |
| `gpu_group`, `nccl`, `ipc` | two members on GPUs; bytes between two GPUs, and on one that both share |
| `plugin`, `vllm_compat`, `worker_extension` | what vLLM loads first; what older releases lack; what is asked of its processes |
| `expert_packing` | experts of a mixture, packed again at each update |
| `base_requests` | requests without an adapter beside others, on CPUs |
| `kv_cache_size` | the size of a server's cache where its GPU is shared |
| `gloo_engine`, `nccl_engine`, `copy_plan` | inside a server on CPUs, on GPUs; from tensors of a checkpoint to its parameters |
| `compact_logprobs`, `token_versions` | cheaper log-probabilities; the weights that sampled each token |
| `adapter_loading`; `auth_middleware`, `server_password` | adapters in a server; who may ask it |

`plugin` and all in the lines below it run inside vLLM, and only they know it.
"""
