"""Small valid configs."""

from typing import Any

from pipeline.config import RunConfig, load_config


def make_config(**sections: Any) -> RunConfig:
    """The smallest config that loads, with the given sections in place of its own."""
    tree: dict[str, Any] = {
        "name": "test",
        "cluster": {"scheduler": "local"},
        "model": {"path": "tiny"},
        "task": {"name": "arithmetic"},
        "loss": {"name": "grpo"},
        "training": {"steps": 1, "prompts_per_step": 1},
    }
    return load_config(tree | sections)
