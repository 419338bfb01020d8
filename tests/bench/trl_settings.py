"""What TRL is told by the scripts beside this one; imports nothing, of the project neither."""

from typing import Any

ON_A_CPU: dict[str, Any] = {
    "gradient_checkpointing": False,
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}

ON_A_GPU: dict[str, Any] = ON_A_CPU | {
    "bf16": True,
    "use_cpu": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
}
"""With vLLM in its own process; parameters are float32, passes bfloat16."""
