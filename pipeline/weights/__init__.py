"""Weights from the trainer to the vLLM servers.

| module | owns |
|---|---|
| `sender`, `link` | every server kept at the trainer's newest weights; the way to one of them |
| `control` | the HTTP routes that pause a server and change its weights |
| `wire` | weights over TCP, through a store |
| `payload`, `shards` | a version where it waits; what a process needs of it, in chunks |
| `gpu_group`, `nccl`, `ipc` | two members on GPUs; bytes between two GPUs, and on one that both share |
| `plugin`, `releases`, `extension` | what vLLM loads first; what older releases lack; what is asked of its processes |
| `expert_packing` | experts of a mixture, packed again at each update |
| `no_adapter` | requests without an adapter beside others, on CPUs |
| `shared_gpu` | the size of a server's cache where its GPU is shared |
| `engine`, `nccl_engine`, `copies` | inside a server on CPUs, on GPUs; from tensors of a checkpoint to its parameters |
| `fast_logprobs`, `token_versions` | cheaper log-probabilities; the weights that sampled each token |
| `adapters`; `guard`, `password` | adapters in a server; who may ask it |

`plugin` and all in the lines below it run inside vLLM, and only they know it.
"""
