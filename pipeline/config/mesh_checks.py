"""Divisibility rules of `training.mesh`: its dimensions must divide the trainer's processes and the model's heads.

Pure. The rules between keys run with `pipeline.config.cross_checks`. The rule for the model's heads runs at submission,
and again on the ranks, which know the heads of every layer.
"""

from pipeline.config import ModelConfig, RunConfig
from pipeline.errors import ConfigError


def replicas_divide_the_trainer(config: RunConfig) -> None:
    """Raise `ConfigError` unless `dp_replicate` divides the trainer's processes."""
    replicas, ranks = config.training.mesh.dp_replicate, _ranks(config)
    if replicas > 1 and config.serve.enabled:
        expected = "1 with serve.enabled: adapters of clients are swapped in shards of one model"
        raise ConfigError("training.mesh.dp_replicate", replicas, expected, "remove it")
    if ranks % replicas:
        expected = f"a divisor of {ranks}, the trainer's processes (resources.trainer.nodes × processes)"
        raise ConfigError("training.mesh.dp_replicate", replicas, expected, "change one of them")


def context_divides_a_replica(config: RunConfig) -> None:
    """Raise `ConfigError` unless `cp` divides the processes of a replica, and rows are packed."""
    cp, ranks = config.training.mesh.cp, _ranks(config) // config.training.mesh.dp_replicate
    if cp == 1:
        return
    if ranks % cp:
        expected = f"a divisor of {ranks}, the trainer's processes in each replica"
        raise ConfigError("training.mesh.cp", cp, expected, "change it, or resources.trainer.processes")
    if config.serve.enabled:
        expected = "1 with serve.enabled: each process computes other rows of a client"
        raise ConfigError("training.mesh.cp", cp, expected, "remove it")
    if not config.training.packing:
        expected = "true with training.mesh.cp: only packed rows are spread over several processes"
        raise ConfigError("training.packing", False, expected, "remove it, or training.mesh.cp")


def experts_divide_a_replica(config: RunConfig) -> None:
    """Raise `ConfigError` unless `ep` divides the processes of a replica, and layers are not recomputed in part."""
    ep, ranks = config.training.mesh.ep, _ranks(config) // config.training.mesh.dp_replicate
    if ranks % ep:
        allowed = ", ".join(str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0)
        expected = f"a divisor of {ranks}, the processes of a replica of the trainer: {allowed}"
        raise ConfigError("training.mesh.ep", ep, expected, "change one of them")
    if ep > 1 and config.training.activation_checkpointing == "selective":
        # FSDP gathers the experts inside of the recomputed layer, by other operations than in the forward pass.
        expected = "none or full with training.mesh.ep above 1"
        raise ConfigError("training.activation_checkpointing", "selective", expected, "change it")


def check_context_heads(cp: int, heads: int | None, key_heads: int | None) -> None:
    """Raise `ConfigError` unless `cp` processes can divide the heads of an attention layer.

    Each process needs the same number of query heads, and the key heads that these read. `heads` and `key_heads` are
    the numbers of query and key heads, None if the model's config has none.
    """
    if heads is None or cp == 1:
        return
    key_heads = key_heads or heads
    if heads % cp or (key_heads % cp and cp % key_heads):
        allowed = [n for n in range(1, heads + 1) if not heads % n and (not key_heads % n or not n % key_heads)]
        expected = f"one of {', '.join(map(str, allowed))} for {heads} query heads and {key_heads} key heads"
        raise ConfigError("training.mesh.cp", cp, expected, "change it")


def check_context_packing(model: ModelConfig, cp: int, packed: bool) -> None:
    """Raise `ConfigError` for `cp` > 1 and a model whose rows cannot be packed."""
    if cp > 1 and not packed:
        expected = f"1 for {model.path}, whose rows cannot be packed: its layers would carry a state between them"
        raise ConfigError("training.mesh.cp", cp, expected, "remove it, or choose another model")


def _ranks(config: RunConfig) -> int:
    return config.resources.trainer.nodes * config.resources.trainer.processes
