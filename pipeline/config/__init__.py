"""The typed configuration of a run: its keys and their rules, what a resumed run may change, and the copy it keeps.

| module | owns |
|---|---|
| `schema` | the keys of the algorithm, and the whole |
| `reading` | how a tree of values becomes a config |
| `aliases` | the key that an unknown one means, also by the names of TRL and verl |
| `places` | the keys of cluster and resources |
| `data` | the keys of datasets |
| `tasks` | the keys of tasks, rewards and a teacher |
| `generation` | the keys of rollouts and servers |
| `evaluation` | the keys of evaluation sets |
| `serving`, `sums` | the keys of a run that serves; the losses that its clients name |
| `values` | the forms of values |
| `rules` | what must hold between keys |
| `relevance` | who reads which key |
| `identity` | which keys make a run the same |
| `kept` | the copy in the run directory |
| `models` | model directories, built-in ones among them |
"""

from pipeline.config.aliases import suggest_key
from pipeline.config.data import ColumnsConfig, DataConfig, SourceConfig
from pipeline.config.evaluation import EvalSetConfig, EvaluationConfig
from pipeline.config.generation import InferenceConfig, RolloutConfig
from pipeline.config.places import ClusterConfig, ResourcesConfig
from pipeline.config.reading import NAMED, is_list, known_form, known_keys, load_config, named_section, nearest
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
from pipeline.config.tasks import RewardConfig, TaskConfig, TeacherConfig

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
    "TeacherConfig",
    "TrackingConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "is_list",
    "known_form",
    "known_keys",
    "load_config",
    "named_section",
    "nearest",
    "suggest_key",
]
