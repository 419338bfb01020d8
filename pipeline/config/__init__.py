"""The typed configuration of a run: its keys and their rules, what a resumed run may change, and the copy it keeps.

| module | owns |
|---|---|
| `schema` | the keys of the algorithm, and the whole |
| `validation` | how a tree of values becomes a config |
| `key_aliases` | the key that an unknown one means, also by the names of TRL and verl |
| `cluster_keys` | the keys of cluster and resources |
| `data_keys` | the keys of datasets |
| `task_keys` | the keys of tasks, rewards and a teacher |
| `rollout_keys` | the keys of rollouts and servers |
| `evaluation_keys` | the keys of evaluation sets |
| `tinker_keys`, `tinker_losses` | the keys of a run that serves; the losses that its clients name |
| `value_types` | the forms of values |
| `cross_checks`, `mesh_checks` | what must hold between keys; what a mesh can be divided by |
| `key_relevance` | who reads which key |
| `run_identity` | which keys make a run the same |
| `frozen_config` | the copy in the run directory |
| `model_directory` | model directories, built-in ones among them |
"""

from pipeline.config.cluster_keys import ClusterConfig, ResourcesConfig
from pipeline.config.data_keys import ColumnsConfig, DataConfig, SourceConfig
from pipeline.config.evaluation_keys import EvalSetConfig, EvaluationConfig
from pipeline.config.key_aliases import suggest_key
from pipeline.config.rollout_keys import InferenceConfig, RolloutConfig
from pipeline.config.schema import (
    CriticConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SftPhaseConfig,
    StreamsConfig,
    TrackingConfig,
    TrainingConfig,
)
from pipeline.config.task_keys import RewardConfig, TaskConfig, TeacherConfig
from pipeline.config.validation import (
    NAMED,
    canonical_key,
    closest_match,
    is_list,
    known_keys,
    load_config,
    named_section,
)

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
    "SftPhaseConfig",
    "SourceConfig",
    "StreamsConfig",
    "TaskConfig",
    "TeacherConfig",
    "TrackingConfig",
    "TrainingConfig",
    "canonical_key",
    "closest_match",
    "is_list",
    "known_keys",
    "load_config",
    "named_section",
    "suggest_key",
]
