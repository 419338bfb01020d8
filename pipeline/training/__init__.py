"""Training: the algorithm's side and the machine's side of an optimizer step.

| module | owns |
|---|---|
| `rows` | what is trained: rows, batches, and every denominator |
| `dispatch` | the controller's handle: one call here is one operation on every rank |
| `control` | how such a call is ordered, and what is known between two of them |
| `residency` | what each operation needs on the device, and what has to move for it |
| `staging` | how rows are cut, travel, and stay on the ranks |
| `operations` | what each rank does when it is asked |
| `ranks` | the processes' side: join the torchrun world, run operations, report failures |
| `worker` | one sharded model with its optimizer on one rank |
| `collate` | a micro-batch as tensors |
| `model`, `attention` | the policy: log-probabilities, attention kept inside each row |
| `optimizer` | AdamW, its schedule, clipping, skipped steps |
"""
