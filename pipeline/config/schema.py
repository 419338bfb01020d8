"""The typed configuration of a run.

Owns every key that a user can set, with its type, bounds and meaning. A `RunConfig` is frozen and complete: after
`load_config` has returned, no other code checks a single value again. Must not know Hydra, torch, Redis or submitit.

    config = load_config({"name": "demo", "cluster": {...}, ...})       # of `pipeline.config.validation`
    config.optim.lr

The field descriptions are the source of `docs/configuration.md`. Keys of training, losses, the cluster, tasks,
data, rollouts, evaluations and the Tinker API are in separate modules. Rules between keys are in
`pipeline.config.cross_checks`, the keys that a resumed run may change in `pipeline.config.run_identity`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.cluster_keys import ClusterConfig, ResourcesConfig
from pipeline.config.data_keys import DataConfig
from pipeline.config.debug_keys import DebugConfig
from pipeline.config.evaluation_keys import EvaluationConfig
from pipeline.config.loss_keys import CriticConfig, LossConfig
from pipeline.config.preference_keys import PreferenceConfig
from pipeline.config.recovery_keys import RecoveryConfig
from pipeline.config.rollout_keys import InferenceConfig, RolloutConfig
from pipeline.config.task_keys import RewardConfig, TaskConfig, TeacherConfig
from pipeline.config.tinker_keys import ServeConfig
from pipeline.config.training_keys import TrainingConfig
from pipeline.config.value_types import (
    NAME_PATTERN,
    Bytes,
    Decay,
    Faults,
    NotNegative,
    Positive,
    Rate,
    Section,
    Texts,
)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): with `rank` > 0 only adapters are trained, saved and sent to the servers."""

    rank: NotNegative = Field(0, description="Rank of the adapters; 0: train all weights.")
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description="The adapters' output is scaled by alpha / rank.")
    targets: Texts = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Names of the linear layers with an adapter.",
    )
    adapter: str = Field("", description="Directory of an adapter to start from; empty: a new adapter.")
    merge: bool = Field(
        False,
        description="Send the servers whole weights, with the adapters merged into them, and export the whole model. "
        "Mixtures of experts need it where servers cannot take adapters.",
    )

    @property
    def travels_alone(self) -> bool:
        """Whether servers and the exported model get the adapter alone instead of whole weights."""
        return self.rank > 0 and not self.merge


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        description="Directory with a Hugging Face config and tokenizer, a name of `conf/models/`, a name on the "
        "Hugging Face Hub whose files were downloaded (`hf download NAME`), or `package:MODULE`, an installed Python "
        "package with weights as a GGUF file, which are converted once into your cache."
    )
    init: Literal["auto", "pretrained", "random"] = Field(
        "auto",
        description="`pretrained`: load the weights of model.path; `random`: initialize random weights; `auto`: "
        "load them, but random ones for a name of `conf/models/`, which has no weights.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Compute type of trainer and servers. float16 has a loss scale: docs/training.md#precision.",
    )
    max_length: Positive = Field(512, description="Largest number of tokens of one sample, including the prompt.")
    lora: LoraConfig = LoraConfig()


MomentType = Literal["float32", "bfloat16", "float8"]


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Peak learning rate; 0: 1e-6 for a pretrained model, 1e-5 for its adapters, 1e-4 for random "
        "weights.",
    )
    beta1: Decay = Field(0.9, description="AdamW's first decay.")
    beta2: Decay = Field(0.95, description="AdamW's second decay.")
    eps: Rate = Field(1e-8, description="AdamW's epsilon.")
    state_dtype: MomentType = Field(
        "float32",
        description="Type of AdamW's two moments between steps; the step is computed in float32. A trained parameter "
        "takes 16 bytes with its gradient and moments, 12 with bfloat16 (DeepSeek-V3, arXiv 2412.19437, section "
        "3.3.3), and 10 with float8, in blocks of at most 256 with a scale each (arXiv 2110.02861).",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Decoupled weight decay.")
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Largest global gradient norm; larger gradients are clipped."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    warmup_steps: NotNegative = Field(0, description="Optimizer steps of linear warm-up from 0.")
    router_bias_rate: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="How far the balancing bias of a mixture's routers (`e_score_correction_bias`) moves at each step, "
        "toward experts with fewer tokens than the mean; 0: it stays as it is.",
    )
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Weight of the auxiliary loss that balances a mixture's experts, for each sequence; 0: none, "
        "whatever the model's config has.",
    )


class StreamsConfig(Section):
    """The streams between the roles."""

    backend: Literal["redis", "files"] = Field("redis", description="Redis Streams, or files in the run directory.")
    budget_bytes: Bytes = Field(
        1 << 28,
        description="Largest size of one stream's entries that are not yet trained and covered by a checkpoint; "
        "then its producer waits. At half of it the trainer saves an early checkpoint.",
    )


class TrackingConfig(Section):
    """Destinations of metrics in addition to the console and metrics.jsonl."""

    trackers: Texts = Field(
        ("wandb",),
        description="Services that get the metrics, each through a separate process: names of the modules in "
        "`pipeline/tracking/trackers/`, such as `[wandb, tensorboard]`; empty: none.",
    )
    mode: Literal["auto", "online", "offline"] = Field(
        "auto",
        description="`auto`: online with a login at the service, else offline. For wandb, a login is a key in the "
        "environment or in `~/.netrc`.",
    )
    project: str = Field("rollcall", description="The project at the service.")


class RunConfig(Section):
    """Keys of the whole run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        description="Name of the run and of its directory: letters, digits, `.`, `_`, `-`."
    )
    output: Path = Field(Path("runs"), description="Directory of the run directories, shared by all nodes.")
    seed: NotNegative = Field(0, description="Seed of weights, data order and sampling.")
    resume: Literal["auto", "scratch"] = Field(
        "auto",
        description="`auto`: resume an existing run from its newest checkpoint; refused if that checkpoint is lost. "
        "`scratch`: this submission starts the run over, and moves the run directory's existing files to `aside/` "
        "inside it.",
    )
    replay: str = Field(
        "",
        description="A run, by its directory or by its name below `output`, whose recorded samples the RL steps train "
        "again, without servers; empty: the run samples its own ([Replay](replay.md#replay)).",
    )
    cluster: ClusterConfig
    resources: ResourcesConfig = ResourcesConfig()
    model: ModelConfig
    task: TaskConfig
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig
    critic: CriticConfig = CriticConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    preference: PreferenceConfig = PreferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    inference: InferenceConfig = InferenceConfig()
    streams: StreamsConfig = StreamsConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    faults: Faults = Field(
        (),
        description="Faults to inject, each once in the run, such as `[kill:inference[0]@step=7, stop:trainer@save]`; "
        "see [Injected faults](operations.md#injected-faults).",
    )
    tracking: TrackingConfig = TrackingConfig()
    serve: ServeConfig = ServeConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.output / self.name

    @property
    def has_rl(self) -> bool:
        """Whether the run has RL steps. False for a run that serves: its clients choose the training."""
        return self.training.steps > 0 and not self.serve.enabled

    @property
    def has_rollouts(self) -> bool:
        """Whether the run generates samples for RL, and so has servers, an actor, a preprocessor and streams.

        False for a replay, which trains recorded samples, and for a run that serves: its clients request samples.
        """
        return self.has_rl and not self.replay

    @property
    def last_phase(self) -> Literal["sft", "preference", "rl"]:
        """The name of the run's last training job."""
        return "rl" if self.has_rl else "preference" if self.has_preference else "sft"

    @property
    def has_preference(self) -> bool:
        """Whether the run trains from preference pairs."""
        return self.preference.steps > 0 or self.preference.epochs > 0

    @property
    def has_reference(self) -> bool:
        """Whether RL has a reference model, for the KL divergence without a teacher."""
        return self.loss.kl > 0 and not self.teacher.url

    @property
    def drops_equal_groups(self) -> bool:
        """Whether groups whose samples all have the same reward are dropped; `auto` is resolved."""
        if self.training.zero_variance_groups != "auto":
            return self.training.zero_variance_groups == "drop"
        others = self.loss.kl > 0 or self.loss.entropy > 0 or bool(self.teacher.url)
        return self.loss.estimator.within_group and not others

    @property
    def shares_prefixes(self) -> bool:
        """Whether packed samples share the computation of common prefixes."""
        setting = self.training.share_prefixes
        return self.resources.device == "cpu" and not self.training.compile if setting is None else setting

    @property
    def has_servers(self) -> bool:
        """Whether the run has servers: for rollouts, for clients' samples, or for evaluations only."""
        return self.has_rollouts or self.evaluation.only or (self.serve.enabled and self.serve.sampling)

    @property
    def server_quorum(self) -> int:
        """The number of servers without which rollouts do not begin, and the attempt does not continue.

        All where the servers are not alike, since each pool of a run that serves has its own models, and where the work
        is shared out once, in a run that only evaluates.
        """
        servers, minimum = self.resources.inference.nodes * self.resources.inference.servers, self.inference.min_servers
        if minimum == "all" or not self.has_rollouts:
            return servers
        return -(-servers // 2) if minimum == "half" else minimum

    @property
    def has_sft(self) -> bool:
        """Whether the run starts with supervised fine-tuning."""
        return self.training.sft.steps > 0 or self.training.sft.epochs > 0

    @property
    def weights_backend(self) -> Literal["gloo", "nccl"]:
        """The transport of weight sync; `auto` is resolved."""
        if self.inference.backend == "auto":
            return "nccl" if self.resources.device == "cuda" and not self.model.lora.travels_alone else "gloo"
        return self.inference.backend
