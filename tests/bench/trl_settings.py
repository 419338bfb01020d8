"""What TRL is told by both of its scripts beside this one; imports nothing, of the project neither."""

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
