"""Training: the loop, the controller that runs it on all ranks, and the models of one rank.

| module | owns |
|---|---|
| `offline/` | job files, on packed datasets |
| `service/` | training operations that clients of the Tinker API request |
| `loop/` | RL and SFT step by step; metrics, checkpoints, evaluations, weight publication |
| `controller/` | the controller's handle: one call is one operation on every rank |
| `model/` | one sharded model with its optimizer on one rank |
| `throughput` | tokens per second and MFU |
| `total_loss` | the loss of a micro-batch: the terms of `pipeline.algorithms`, weighted and summed |
| `loss_specs` | what a model can be trained for |
| `batching/` | token sequences, their advantages, and micro-batches |
| `train_jobs` | what a trainer can be asked to do |
| `worker_spec` | what a model is made from |
"""
