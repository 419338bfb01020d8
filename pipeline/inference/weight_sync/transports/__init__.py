"""Transports of weights from the trainer to one server.

| module | owns |
|---|---|
| `gloo` | weights over TCP, on CPUs |
| `nccl`, `ipc` | weights between two GPUs; on a GPU that trainer and server share |
| `gpu_group` | the handshake of the two members of a GPU transport |
| `gpu_transport` | the choice between the two GPU transports |
"""
