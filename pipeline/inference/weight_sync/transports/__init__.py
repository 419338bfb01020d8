"""Transports of weights from the trainer to one server: gloo on CPUs, nccl between GPUs, ipc on a shared GPU."""
