"""One model on one rank: it knows shards and devices, and nothing of the algorithm.

| module | owns |
|---|---|
| `worker` | a sharded model with its optimizer, and the loop over micro-batches |
| `model`, `head`, `attention` | what the model answers, and attention kept inside each row |
| `fsdp`, `shards` | the model spread over ranks; one tensor's rows, filled and gathered |
| `collate` | a micro-batch as tensors |
| `optimizer` | AdamW, its schedule, clipping, skipped steps |
| `offload` | parts that leave the device and come back |
| `lora`, `export` | adapters; model directories that others load |
"""
