"""The typed configuration of a run: its keys and their rules, what a resumed run may change, and the copy it keeps.

`schema` has the keys, `places` those of cluster and resources, `data` those of datasets, `tasks` those of tasks and
rewards, `generation` those of rollouts and servers, `evaluation` those of evaluation sets, `values` the forms of
values; `reading` makes a config of a tree. `rules` has what must hold between keys, `relevance` who reads which key,
`identity` which of them make a run the same, `kept` the copy in the run directory, `models` the model directories,
`serving` the keys of a run that serves, `sums` the losses that its clients name.
"""

from pipeline.config.data import ColumnsConfig, DataConfig, SourceConfig
from pipeline.config.evaluation import EvalSetConfig, EvaluationConfig
from pipeline.config.generation import InferenceConfig, RolloutConfig
from pipeline.config.places import ClusterConfig, ResourcesConfig
from pipeline.config.reading import NAMED, known_form, known_keys, load_config, named_section, nearest
from pipeline.config.schema import (
    CriticConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    StreamsConfig,
    TrackingConfig,
    TrainingConfig,
    WarmStartConfig,
)
from pipeline.config.tasks import RewardConfig, TaskConfig

__all__ = [
    "NAMED",
    "ClusterConfig",
    "ColumnsConfig",
    "CriticConfig",
    "DataConfig",
    "EvalSetConfig",
    "EvaluationConfig",
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
    "known_form",
    "known_keys",
    "load_config",
    "named_section",
    "nearest",
]
