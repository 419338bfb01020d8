"""Keys of the algorithm that have an effect only with certain values of another key. Pure.

The check of a config and docs/configuration.md derive from one table. It has the keys of losses, critic, adapters and
drafts, since an experiment with an unread key would be misleading; operational keys are not in it.

    unread_keys(config)     # yields ("loss.beta", 0.1, READ_WITH["loss.beta"]) for a loss without β
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pipeline.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from pipeline.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from pipeline.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from pipeline.config import LossConfig, PreferenceConfig, RunConfig, known_keys


@dataclass(frozen=True)
class KeyReader:
    """The condition under which a key is read: `key` has one of `values`, or without values is above 0."""

    key: str
    values: tuple[str, ...] = ()

    def reads(self, config: RunConfig) -> bool:
        """Whether this config satisfies the condition."""
        value = value_of(config, self.key)
        return value in self.values if self.values else value > 0

    def __str__(self) -> str:
        """The condition in words, such as `loss.name=ppo, grpo or dapo`."""
        *others, last = self.values or ("",)
        choices = f"{', '.join(others)} or {last}" if others else last
        return f"{self.key}={choices}" if self.values else f"{self.key} above 0"


def _parameters_of(
    registry: Mapping[str, PolicyLoss] | Mapping[str, AdvantageEstimator] | Mapping[str, PreferenceLoss],
    key: str,
    section: type[LossConfig] | type[PreferenceConfig] = LossConfig,
) -> dict[str, KeyReader]:
    """The keys of a section that are parameters of some entries of a registry, not of all; `key` chooses the entry."""
    readers = {
        name: tuple(choice for choice, entry in registry.items() if name in entry.keys) for name in section.model_fields
    }
    prefix = "preference" if section is PreferenceConfig else "loss"
    return {f"{prefix}.{name}": KeyReader(key, by) for name, by in readers.items() if 0 < len(by) < len(registry)}


_CRITIC = KeyReader(
    "loss.advantage_estimator", tuple(name for name, entry in ADVANTAGE_ESTIMATORS.items() if entry.has_critic)
)
_KL, _LORA = KeyReader("loss.kl"), KeyReader("model.lora.rank")
_LOOKUP, _DRAFTS = (KeyReader("inference.speculation.method", values) for values in (("ngram",), ("ngram", "draft")))

READ_WITH: Mapping[str, KeyReader] = {
    **_parameters_of(POLICY_LOSSES, "loss.name"),
    **_parameters_of(ADVANTAGE_ESTIMATORS, "loss.advantage_estimator"),
    **_parameters_of(PREFERENCE_LOSSES, "preference.loss", PreferenceConfig),
    "loss.tis_cap": KeyReader("loss.tis", ("truncate", "mask")),
    "loss.tis_low": KeyReader("loss.tis", ("mask",)),
    "loss.sequence_mask": KeyReader("loss.tis", ("truncate", "mask")),
    "training.overlong_penalty": KeyReader("training.overlong_buffer"),
    "loss.kl_in": _KL,
    "loss.kl_estimator": _KL,
    "loss.reference_every": _KL,
    "critic.lr": _CRITIC,
    "critic.clip": _CRITIC,
    "model.lora.alpha": _LORA,
    "model.lora.targets": _LORA,
    "model.lora.adapter": _LORA,
    "model.lora.merge": _LORA,
    "inference.speculation.tokens": _DRAFTS,
    "inference.speculation.lookup_min": _LOOKUP,
    "inference.speculation.lookup_max": _LOOKUP,
    "inference.speculation.model": KeyReader("inference.speculation.method", ("draft",)),
}
"""The condition of each key. Keys that are parameters of functions in `pipeline.algorithms` are derived from these."""


def unread_keys(config: RunConfig) -> Iterator[tuple[str, Any, KeyReader]]:
    """Changed keys that are not read: key, value, and the condition under which it would be read."""
    for key, reader in READ_WITH.items():
        value = value_of(config, key)
        if value != default_of(key) and not reader.reads(config):
            yield key, value, reader


def default_of(key: str) -> Any:
    """The default of a dotted key."""
    return known_keys()[key].get_default(call_default_factory=True)


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)
