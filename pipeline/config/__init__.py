"""The typed configuration of a run: its keys and their rules, what a resumed run may change, and the copy it keeps.

| module | owns |
|---|---|
| `schema` | the keys, and how a tree of values becomes a config |
| `places` | the keys of cluster and resources |
| `data` | the keys of datasets |
| `serving`, `sums` | the keys of a run that serves; the losses that its clients name |
| `values` | the forms of values |
| `rules` | what must hold between keys |
| `relevance` | who reads which key |
| `identity` | which keys make a run the same |
| `kept` | the copy in the run directory |
| `models` | model directories, built-in ones among them |
"""

from pipeline.config.data import ColumnsConfig, DataConfig, SourceConfig
from pipeline.config.places import ClusterConfig, ResourcesConfig
from pipeline.config.schema import (
    CriticConfig,
    InferenceConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    StreamsConfig,
    TaskConfig,
    TrackingConfig,
    TrainingConfig,
    WarmStartConfig,
    known_keys,
    load_config,
    nearest,
)

__all__ = [
    "ClusterConfig",
    "ColumnsConfig",
    "CriticConfig",
    "DataConfig",
    "InferenceConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "StreamsConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "known_keys",
    "load_config",
    "nearest",
]
