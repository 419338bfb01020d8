"""vLLM as an inference engine: the start of its servers, and code that runs inside their processes.

| module | owns |
|---|---|
| `vllm_engine` | vLLM as an `InferenceEngine`: which models it serves |
| `server_command`, `installed_release` | a server's command line and environment; the installed vLLM |
| `stock_functions` | vLLM's functions that are replaced here, found or refused |
| `plugin`, `vllm_compat` | the plugin, which vLLM loads first; differences between releases |
| `worker_extension` | methods that the trainer calls in a server's worker processes |
| `transfer_engine`, `gloo_engine`, `nccl_engine` | an update of the weights inside a server; over TCP; on GPUs |
| `copy_plan`, `direct_loading` | copies from checkpoint tensors to a model's parameters; what loaders write |
| `verified_plans` | which of these copies were verified in an earlier start |
| `adapter_loading`, `base_requests` | LoRA adapters; requests without an adapter next to others, on CPUs |
| `decoding_checks`, `draft_weights` | rules of quantized weights and of drafts; the weights of a model that drafts |
| `gpu_capability` | the GPUs that FP8 needs |
| `expert_packing` | experts of a mixture, packed again at each update |
| `routing_capture` | the experts of each token, from servers on CPUs |
| `model_inspection` | what a model's class supports, found out in a fork |
| `kv_cache_size` | the size of the KV cache on a shared GPU |
| `compact_logprobs`, `token_versions` | cheaper log-probabilities; the policy version that sampled each token |
| `request_times` | the times of each request in the queue, in prefill and in decode |
| `auth_middleware`, `server_password` | authentication of requests |
| `server_arguments` | validation of `inference.extra_args` by vLLM's own parser |
"""
