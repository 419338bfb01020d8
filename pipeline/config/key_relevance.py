"""Who reads which key of the algorithm: the keys that say nothing unless another key has a certain value.

Owns one table, from which the check of a config and docs/configuration.md derive. Keys of losses, critic and adapters
are in it, where one that nobody reads would pass for an experiment; those that only say how something is carried out
are not. Pure; must not know what a key does.

    unread(config)          # [("loss.beta", 0.1, READ_WITH["loss.beta"])] for a loss that has no β
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pipeline.config import RunConfig, known_keys


@dataclass(frozen=True)
class KeyReader:
    """What reads a key: that `key` has one of `values`, or without values a number above 0."""

    key: str
    values: tuple[str, ...] = ()

    def reads(self, config: RunConfig) -> bool:
        """Whether this config has it so."""
        value = value_of(config, self.key)
        return value in self.values if self.values else value > 0

    def __str__(self) -> str:
        """As `loss.name=ppo, grpo or dapo`."""
        *others, last = self.values or ("",)
        among = f"{', '.join(others)} or {last}" if others else last
        return f"{self.key}={among}" if self.values else f"{self.key} above 0"


_CLIPPED = KeyReader("loss.name", ("ppo", "grpo", "gspo", "dr_grpo", "dapo", "cispo", "reinforce_pp"))
_CRITIC = KeyReader("loss.advantage_estimator", ("gae",))
_KL, _LORA = KeyReader("loss.kl"), KeyReader("model.lora.rank")

READ_WITH: Mapping[str, KeyReader] = {
    "loss.clip_low": _CLIPPED,
    "loss.clip_high": _CLIPPED,
    "loss.ratio_cap": KeyReader("loss.name", ("reinforce", "rloo")),
    "loss.beta": KeyReader("loss.name", ("dro",)),
    "loss.tis": KeyReader("loss.old_logprobs", ("recompute",)),
    "loss.tis_cap": KeyReader("loss.tis", ("truncate", "mask")),
    "loss.kl_in": _KL,
    "loss.kl_estimator": _KL,
    "loss.reference_every": _KL,
    "loss.gae_lambda": _CRITIC,
    "critic.lr": _CRITIC,
    "critic.clip": _CRITIC,
    "model.lora.alpha": _LORA,
    "model.lora.targets": _LORA,
    "model.lora.adapter": _LORA,
    "model.lora.merge": _LORA,
}


def unread_keys(config: RunConfig) -> Iterator[tuple[str, Any, KeyReader]]:
    """The keys that have another value than their default and that nothing reads: key, value, what would read it."""
    for key, reader in READ_WITH.items():
        value = value_of(config, key)
        if value != default_of(key) and not reader.reads(config):
            yield key, value, reader


def default_of(key: str) -> Any:
    """What a dotted key is when nobody sets it."""
    return known_keys()[key].get_default(call_default_factory=True)


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)
