"""One model on one rank, with its shards and devices; independent of the algorithm.

| module | owns |
|---|---|
| `model_worker` | a sharded model with its optimizer, and the loop over micro-batches |
| `models`, `lm_head`, `logit_rule` | policy and critic; log-probabilities; how a family scales and caps logits |
| `packed_attention`, `long_rows`, `attention_sinks` | attention inside each row, by cuDNN in long ones; sinks |
| `experts`, `expert_dispatch` | the experts of a mixture, by grouped products; tokens that travel to them |
| `routers`, `router_loss` | the choice of experts in float32; the auxiliary loss that balances them |
| `routing_replay` | the experts that a server chose, in place of the routers' choice |
| `expert_load` | tokens of each expert, and the bias that evens them out |
| `supported_architectures`, `rope` | supported architectures; rotary frequencies, as in the servers |
| `fsdp`, `row_shards` | the model sharded over ranks; one tensor's rows, filled and gathered |
| `collate`, `context_parallel` | a micro-batch as tensors; a packed line that ranks share |
| `optimizer`, `loss_scale` | AdamW, its schedule, clipping, skipped steps; the loss scale of float16 |
| `moment_storage` | types in which AdamW's moments are stored between steps |
| `cpu_offload` | parts that move to host memory and back |
| `weight_loading`, `checkpoint_layout`, `safetensors_files` | initial weights; file tensors to network tensors |
| `lora`, `expert_lora`, `adapter_merge` | adapters, those of experts, and whole weights with them |
| `public_tensors` | what leaves the trainer: whole, or this rank's rows |
| `hf_export`, `gguf_conversion` | exported model directories; those made of a GGUF file |
| `adapter_swap`, `token_queries` | several adapters that take turns on a model; log-probabilities of given tokens |
| `recomputation` | activations that the backward pass computes again |
| `model_flops`, `attention_shapes` | floating-point operations; kinds, windows and heads of attention layers |
| `model_size`, `activation_size` | a model's size; the bytes that its backward pass needs |
| `tiny_config`, `packing_probe` | a tiny copy of a model; the check that packing keeps results |
| `to_device`, `worker_outputs` | copies from the host to the device, and of results to the host |
"""
