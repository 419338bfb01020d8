"""What TRL is told by the scripts beside this one; imports nothing, of the project neither."""

from typing import Any

_ANYWHERE: dict[str, Any] = {
    "gradient_checkpointing": False,
    "fp16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}

ON_A_CPU = _ANYWHERE | {"bf16": False, "use_cpu": True}
ON_A_GPU = _ANYWHERE | {
    "bf16": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
}
"""With vLLM in its own process; parameters are float32, passes bfloat16."""
