"""The typed configuration of a run: its keys, their rules, the keys that a resumed run may change, and the frozen copy.

| module | owns |
|---|---|
| `schema` | the keys of model, optimizer, streams and tracking, and the whole `RunConfig` |
| `training_keys` | the keys of training, its mesh and its SFT phase |
| `loss_keys` | the keys of the loss, its advantages and the critic |
| `preference_keys` | the keys of training from preference pairs |
| `learning_rates` | the learning rates of runs that set none |
| `validation` | the validation of a tree of values, and its errors |
| `key_aliases` | suggestions for unknown keys, including the names of TRL and verl |
| `cluster_keys` | the keys of cluster and resources |
| `container_keys` | the keys of a job's containers |
| `data_keys` | the keys of datasets |
| `task_keys` | the keys of tasks, rewards and a teacher |
| `rollout_keys` | the keys of rollouts and servers |
| `recovery_keys` | the keys of restarts in place |
| `evaluation_keys` | the keys of evaluation sets |
| `tinker_keys` | the keys of a run that serves |
| `value_types` | the types of values |
| `cross_checks`, `mesh_checks`, `fault_checks` | the rules between keys; of a mesh; of injected faults |
| `loss_checks`, `teacher_checks`, `debug_checks` | the rules of the loss; of a teacher; those of `debug.*` |
| `optimizer_checks`, `gpu_checks`, `dtype_checks` | the rules of the optimizer; of GPUs; of the compute type |
| `debug_keys` | the keys of logs, profiles and a debugger |
| `key_relevance` | keys that are read only with certain values of another key |
| `routing_shape` | routing replay: the record of a token, and which runs have one |
| `run_identity` | the keys that identify a run |
| `frozen_config` | the copy in the run directory |
| `model_directory` | model directories, including built-in ones |
| `model_shape_checks` | the rules between the sizes in a model's config.json |
| `packaged_model` | models whose weights an installed package contains |
"""

from pipeline.config.cluster_keys import ClusterConfig, ResourcesConfig
from pipeline.config.data_keys import ColumnsConfig, DataConfig, SourceConfig
from pipeline.config.evaluation_keys import EvalSetConfig, EvaluationConfig
from pipeline.config.key_aliases import suggest_key
from pipeline.config.loss_keys import CriticConfig, LossConfig
from pipeline.config.preference_keys import PreferenceConfig
from pipeline.config.rollout_keys import InferenceConfig, RolloutConfig
from pipeline.config.schema import (
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    StreamsConfig,
    TrackingConfig,
)
from pipeline.config.task_keys import RewardConfig, RewardModelConfig, TaskConfig, TeacherConfig
from pipeline.config.training_keys import SftPhaseConfig, TrainingConfig
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
    "PreferenceConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RewardModelConfig",
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
