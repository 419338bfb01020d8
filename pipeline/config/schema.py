"""The typed configuration of a run.

Owns every key a user can set, its type, its bounds and its meaning. Promises that a `RunConfig` is frozen and whole:
once `load_config` returned, no other code checks a single value again. Must not know Hydra, torch, Redis or submitit.

    config = load_config({"name": "demo", "cluster": {...}, ...})       # of `pipeline.config.reading`
    config.optim.lr

The field descriptions, here and for `cluster.*` and `resources.*` in `pipeline.config.places`, are the source of
`docs/configuration.md`; those of tasks, data, generation, evaluations and the API have modules of their own too. Rules
between keys are in `pipeline.config.rules`, the keys that a resumed run may change in `pipeline.config.identity`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.data import DataConfig
from pipeline.config.evaluation import EvaluationConfig
from pipeline.config.generation import InferenceConfig, RolloutConfig
from pipeline.config.places import ClusterConfig, ResourcesConfig
from pipeline.config.serving import ServeConfig
from pipeline.config.tasks import RewardConfig, TaskConfig, TeacherConfig
from pipeline.config.values import (
    NAME_FORM,
    Bytes,
    Decay,
    Fraction,
    NotNegative,
    Positive,
    Rate,
    Seconds,
    Section,
    Texts,
)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): with `rank` > 0 only they are trained, saved and sent to the servers."""

    rank: NotNegative = Field(0, description="Rank of the adapters; 0: all weights are trained.")
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description="Their output is scaled by alpha / rank.")
    targets: Texts = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Names of the linear layers that get one.",
    )
    adapter: str = Field("", description="Directory of an adapter to go on from; empty: a fresh one.")


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        description="Directory with a Hugging Face config and tokenizer, a name of `conf/models/`, or one on the "
        "Hugging Face Hub whose files were downloaded (`hf download NAME`)."
    )
    init: Literal["auto", "pretrained", "random"] = Field(
        "auto",
        description="Load the weights there, or make random ones. `auto`: load them; random ones only for a name of "
        "`conf/models/`, which has no weights.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Compute type of trainer and servers.")
    max_length: Positive = Field(512, description="Most tokens of one sample, prompt included.")
    lora: LoraConfig = LoraConfig()


class LossConfig(Section):
    """The policy loss and the advantages it weighs."""

    name: Literal["reinforce", "ppo", "grpo", "gspo", "dr_grpo", "dapo", "cispo", "rloo", "reinforce_pp", "dro"] = (
        Field(description="The policy loss.")
    )
    advantage: Literal["group", "group_std", "leave_one_out", "batch", "group_batch", "gae"] = Field(
        "group_std",
        description="Baseline of the advantages: group mean, group mean over its deviation, leave-one-out mean, "
        "mean of the whole batch over its deviation, group mean over the batch's deviation, or a critic's values.",
    )
    proximal: Literal["behaviour", "recompute"] = Field(
        "behaviour",
        description="Policy that the ratio is taken over: the one that sampled, or the trainer's own at the start of "
        "the step, whose log-probabilities are computed anew where a batch takes several optimizer steps.",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="What the ratio of the recomputed policy to the one that sampled does to each token: weigh it, "
        "truncated at correction_cap, or drop it outside of 1 / correction_cap … correction_cap.",
    )
    correction_cap: Annotated[float, Field(gt=1)] = Field(2.0, description="Bound of that ratio.")
    clip_low: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="The ratio is clipped from below at 1 − clip_low."
    )
    clip_high: Annotated[float, Field(ge=0)] = Field(
        0.2, description="The ratio is clipped from above at 1 + clip_high."
    )
    normalise: Literal["token", "sequence", "prompt", "fixed"] = Field(
        "token", description="What each step's loss is the mean over; `fixed` divides by samples × model.max_length."
    )
    kl: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Weight of the KL divergence from a frozen copy of the policy, the reference model, or from the "
        "model at teacher.url; 0: none.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Whether that KL is a term of the loss, or taken off the reward of each token."
    )
    reference_every: NotNegative = Field(
        0, description="Steps after which the reference model becomes the policy of that time; 0: never."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL (Schulman 2020).")
    entropy: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the entropy bonus.")
    ratio_cap: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Truncation of the importance weight (truncated importance sampling)."
    )
    beta: Annotated[float, Field(ge=0)] = Field(
        0.05, description="Weight of the squared distance from the policy that sampled."
    )
    discount: Fraction = Field(1.0, description="What a reward is worth one sampled token earlier (γ).")
    trace: Fraction = Field(0.95, description="Decay of the temporal differences (λ).")


class CriticConfig(Section):
    """The value model of `loss.advantage=gae`; it starts as the policy with a fresh head for one number."""

    lr: Rate = Field(1e-4, description="Its learning rate; the rest of its optimizer is the policy's.")
    clip: Annotated[float, Field(ge=0)] = Field(
        0.2, description="Most that a value may move in one step before its loss stops pulling; 0: no bound."
    )


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Rate = Field(1e-4, description="Peak learning rate.")
    beta1: Decay = Field(0.9, description="AdamW's first decay.")
    beta2: Decay = Field(0.95, description="AdamW's second decay.")
    eps: Rate = Field(1e-8, description="AdamW's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Decoupled weight decay.")
    clip_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="Global gradient norm is clipped to this.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    warmup_steps: NotNegative = Field(0, description="Optimizer steps of linear warm-up from 0.")


class WarmStartConfig(Section):
    """Supervised fine-tuning, before RL or alone, on `data.*`, or without that on the task's demonstrations. Without
    steps and epochs there is none."""

    steps: NotNegative = Field(0, description="Its optimizer steps.")
    epochs: Annotated[float, Field(ge=0)] = Field(
        0, description="In place of steps: how often each row of data.path is trained."
    )
    batch: Positive = Field(128, description="Rows of each of its steps.")
    lr: Rate = Field(1e-3, description="Its learning rate.")


class TrainingConfig(Section):
    """How long and in which portions to train."""

    steps: NotNegative = Field(
        description="Steps of RL; each trains one batch. 0: none, and no role but the trainer: then the warm start is "
        "the run."
    )
    prompts_per_step: Positive = Field(description="Groups (prompts) of a batch, which one step trains.")
    max_lag: NotNegative = Field(1, description="Most steps between the weights that sampled and those that train.")
    stale: Literal["refuse", "mask"] = Field(
        "refuse",
        description="What becomes of a group with tokens older than max_lag: it is refused and sampled again, or those "
        "tokens do not count in the loss; without any other token it is refused all the same.",
    )
    update_epochs: Positive = Field(1, description="How often each batch is trained.")
    mini_batches: Positive = Field(
        1, description="Optimizer steps of one such epoch; each trains as many of the batch's prompts."
    )
    micro_batch_tokens: Positive = Field(
        16384,
        description="Token budget of a micro-batch in one process: with padding, and what samples share for each.",
    )
    micro_batch_rows: NotNegative = Field(0, description="Most samples of a micro-batch; 0: what the budget holds.")
    packing: bool = Field(
        True,
        description="Pack samples without padding, attention kept inside each; a model whose other layers would carry "
        "a state from one into the next is padded in any case, with a warning.",
    )
    share_prefixes: bool | None = Field(
        None,
        description="Compute what several samples of a micro-batch begin with, such as their prompt, once for all of "
        "them, where samples are packed. Unset: on CPUs, where layers are not compiled.",
    )
    zero_advantage: Literal["keep", "drop"] = Field(
        "keep", description="What becomes of groups whose samples all score alike."
    )
    overlong: Literal["keep", "mask"] = Field(
        "keep", description="Whether tokens of samples that were cut off count in the loss; their rewards always do."
    )
    activation_checkpointing: bool = Field(
        False, description="Compute each layer's activations again in the backward pass instead of keeping them."
    )
    compile: bool = Field(False, description="Compile the model's layers (torch.compile).")
    reshard: bool = Field(
        False,
        description="Shard parameters and gradients again after every pass through a layer (ZeRO-3): less memory. Else "
        "both are whole on every rank from the first micro-batch of an operation to its last (ZeRO-2).",
    )
    offload: bool = Field(
        False, description="Keep on the device only the model that computes; the others wait in host memory or on disk."
    )
    publish_from: Literal["gpu", "host"] = Field(
        "gpu",
        description="Where weights wait until servers on GPUs have them: in memory of the trainer's first GPU, or in "
        "that of its host, which takes longer.",
    )
    metrics: Literal["none", "basic", "with_entropy"] = Field(
        "basic", description="What is measured of each batch; see docs/metrics.md."
    )
    eval_every: NotNegative = Field(25, description="Steps between held-out evaluations; 0: only first and last.")
    keep_best: bool = Field(
        True, description="Keep the model of the lowest held-out loss so far as `best/`, where SFT has held-out rows."
    )
    checkpoint_every: Positive = Field(50, description="Most steps between checkpoints.")
    checkpoint_seconds: Annotated[float, Field(ge=0)] = Field(
        600, description="Most seconds between checkpoints: one is made after the step in which they pass. 0: no limit."
    )
    checkpoints: str = Field(
        "", description="URL (any that fsspec knows) to keep the checkpoints below; empty: in the run directory."
    )
    async_checkpoints: bool = Field(True, description="Train on while a checkpoint is written.")
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(2, description="Committed checkpoints kept.")
    data_seconds: Seconds = Field(600, description="Longest the trainer waits for a batch before the run fails.")
    warm_start: WarmStartConfig = WarmStartConfig()
    jobs: str = Field(
        "",
        description="A job file, or a folder of them, that the trainer does instead (docs/jobs.md); there are no other "
        "steps then.",
    )

    @property
    def masked_finish(self) -> str | None:
        """How samples ended of which no token counts."""
        return "length" if self.overlong == "mask" else None


class StreamsConfig(Section):
    """The streams between the roles."""

    backend: Literal["redis", "files"] = Field("redis", description="Redis Streams, or files in the run directory.")
    budget_bytes: Bytes = Field(
        1 << 28,
        description="Most bytes of one stream that are not trained and committed; then its producer waits. "
        "At half of it the trainer commits early.",
    )


class TrackingConfig(Section):
    """Where metrics go besides the console and metrics.jsonl."""

    wandb: Literal["auto", "online", "offline", "off"] = Field(
        "auto", description="`auto`: online with a key in the environment or in `~/.netrc`, else offline."
    )
    project: str = Field("rollcall", description="The wandb project.")


class RunConfig(Section):
    """Everything one run is made from."""

    name: Annotated[str, Field(pattern=NAME_FORM)] = Field(
        description="Name of the run and of its directory: letters, digits, `.`, `_`, `-`."
    )
    output: Path = Field(Path("runs"), description="Directory (shared by all nodes) that holds the run directories.")
    seed: NotNegative = Field(0, description="Seed of weights, data order and sampling.")
    resume: Literal["auto", "scratch"] = Field(
        "auto",
        description="`auto`: a run that exists goes on from its newest checkpoint, and is refused if that is lost. "
        "`scratch`: this submission starts it over, and moves what is there to `aside/` in the run directory.",
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
    training: TrainingConfig
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    inference: InferenceConfig = InferenceConfig()
    streams: StreamsConfig = StreamsConfig()
    tracking: TrackingConfig = TrackingConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.output / self.name

    @property
    def has_rollouts(self) -> bool:
        """Whether anything is sampled: without steps of RL there are no servers, actor, preprocessor and streams; and
        of a run that serves, its clients decide."""
        return self.training.steps > 0 and not self.serve.enabled

    @property
    def has_reference(self) -> bool:
        """Whether RL has a reference model: what a KL divergence is from where there is no teacher."""
        return self.loss.kl > 0 and not self.teacher.url

    @property
    def shares_prefixes(self) -> bool:
        """Whether samples share what they begin with, where they are packed."""
        asked = self.training.share_prefixes
        return self.resources.device == "cpu" and not self.training.compile if asked is None else asked

    @property
    def has_servers(self) -> bool:
        """Whether there are servers: for rollouts, for what clients sample, or for evaluations alone."""
        return self.has_rollouts or self.evaluation.alone or (self.serve.enabled and self.serve.sampling)

    @property
    def has_sft(self) -> bool:
        """Whether the run begins with supervised fine-tuning."""
        return self.training.warm_start.steps > 0 or self.training.warm_start.epochs > 0

    @property
    def weights_backend(self) -> Literal["gloo", "nccl"]:
        """How weights travel, decided."""
        if self.inference.backend == "auto":
            return "nccl" if self.resources.device == "cuda" and not self.model.lora.rank else "gloo"
        return self.inference.backend
