"""The identity of a run: the keys that must be equal for two submissions to be the same run. Pure.

Operational keys control how a run is executed, not its result, and a resumed run may change them. Two configs with the
same digest differ in operational keys only.
"""

import hashlib
import json
from typing import Any

from pipeline.config import RunConfig

OPERATIONAL = (
    "output",
    "resume",
    "cluster",
    "debug",
    "resources",
    "faults",
    "recovery",
    "reward.model.batch_size",
    "reward.model.seconds",
    "reward.model.threads",
    "tracking",
    "task.memory_bytes",
    "task.processes",
    "task.sandbox",
    "task.seconds",
    "streams.budget_bytes",
    "teacher.concurrency",
    "teacher.key_file",
    "teacher.seconds",
    "teacher.url",
    "training.activation_checkpointing",
    "training.async_checkpoints",
    "training.checkpoint_every",
    "training.checkpoint_seconds",
    "training.compile",
    "training.data_seconds",
    "training.keep_checkpoints",
    "training.memory",
    "training.mesh.cp",
    "training.mesh.dp_replicate",
    "training.mesh.ep",
    "training.micro_batch_rows",
    "training.micro_batch_tokens",
    "training.offload_idle_models",
    "training.reshard_after_forward",
    "training.share_prefixes",
    "rollout.concurrency",
    "rollout.adaptive_concurrency",
    "rollout.episode_seconds",
    "rollout.journal_bytes",
    "rollout.max_consecutive_failures",
    "rollout.sample_store_bytes",
    "rollout.request_seconds",
    "rollout.max_tokens_per_request",
    "inference.api_server_count",
    "inference.compile",
    "inference.relay_fanout",
    "inference.speculation",
    "inference.extra_args",
    "inference.gpu_memory",
    "inference.kv_cache_bytes",
    "inference.max_sequences",
    "inference.min_servers",
    "inference.update_seconds",
    "serve.base_servers",
    "serve.checkpoint_seconds",
    "serve.checkpoint_steps",
    "serve.host",
    "serve.keys",
    "serve.max_rank",
    "serve.port",
    "serve.request_bytes",
    "serve.restarts",
    "serve.sampling",
    "serve.session_seconds",
    "serve.silent_seconds",
    "serve.snapshot_seconds",
    "serve.whole_servers",
)
"""Keys, and whole sections, that a resumed run may change: deadlines, sizes and locations."""


def identity_digest(config: RunConfig) -> str:
    """Hex digest of all keys that must be equal for two submissions to be the same run."""
    text = json.dumps(_identity(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(mine: RunConfig, other: RunConfig) -> list[str]:
    """The identifying keys in which two configs differ, as `key: mine → other`."""
    left, right = _identity(mine), _identity(other)
    keys = sorted(left.keys() | right.keys())
    return [f"{key}: {left.get(key)!r} → {right.get(key)!r}" for key in keys if left.get(key) != right.get(key)]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested tree with dotted keys: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _identity(config: RunConfig) -> dict[str, Any]:
    flat = flatten(config.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if not is_operational(key)}


def is_operational(key: str) -> bool:
    """Whether a resumed run may change the key."""
    return any(key == name or key.startswith(f"{name}.") for name in OPERATIONAL)
