"""Training: the algorithm's side and the machine's side of an optimizer step.

| module | owns |
|---|---|
| `rows` | what is trained: rows, batches, and every denominator |
| `dispatch` | the controller's handle: one call here is one operation on every rank |
| `ranks` | the processes' side: join the torchrun world, run operations, report failures |
| `worker` | one sharded model with its optimizer on one rank |
| `collate` | a micro-batch as tensors |
| `model`, `attention` | the policy: log-probabilities, attention kept inside each row |
| `optimizer` | AdamW, its schedule, clipping, skipped steps |
"""
