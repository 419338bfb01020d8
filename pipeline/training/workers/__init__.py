"""One model on one rank: it knows shards and devices, and nothing of the algorithm.

| module | owns |
|---|---|
| `worker` | a sharded model with its optimizer, and the loop over micro-batches |
| `model`, `head`, `attention` | what the model answers, and attention kept inside each row |
| `supported`, `rope` | which architectures are computed right; rotary frequencies that the servers use as well |
| `fsdp`, `shards` | the model spread over ranks; one tensor's rows, filled and gathered |
| `collate` | a micro-batch as tensors |
| `optimizer` | AdamW, its schedule, clipping, skipped steps |
| `offload` | parts that leave the device and come back |
| `loading`, `form`, `tensor_files` | a model's first weights; which tensors of files make which of the network |
| `lora`, `export` | adapters; model directories that others load |
| `guests`, `queries` | several adapters that take turns on a model; answers about given tokens |
| `sizes`, `small`, `likeness` | a model's size; a small copy of it; whether its rows come out packed as alone |
| `transfer` | numbers from the host to the device |
"""
