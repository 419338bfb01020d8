"""The keys of training: steps, batches, memory, the mesh and checkpoints, `training.*`."""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.value_types import Fraction, NotNegative, Positive, Rate, Seconds, Section

Recomputation = Literal["none", "selective", "full"]
"""Which activations a backward pass recomputes (activation checkpointing)."""


class SftPhaseConfig(Section):
    """Supervised fine-tuning, before RL or alone, on `data.*`, or without a data.path on the task's demonstrations.
    Without steps and epochs there is no SFT phase."""

    steps: NotNegative = Field(0, description="Optimizer steps of SFT.")
    epochs: Annotated[float, Field(ge=0)] = Field(0, description="Instead of steps: passes over the rows of data.path.")
    batch: Positive = Field(128, description="Rows in each SFT step.")
    lr: Rate = Field(1e-3, description="Learning rate of SFT.")


class MeshConfig(Section):
    """The dimensions of the trainer's mesh of processes. What the other dimensions leave is `dp_shard`."""

    dp_replicate: Positive = Field(
        1,
        description="Replicas of each model (HSDP). Each replica is sharded over an equal part of the trainer's "
        "processes, and its gradients are summed with the other replicas'. 1: one model, sharded over all (FSDP).",
    )
    ep: Positive = Field(
        1,
        description="Expert parallelism: processes among which the experts of each layer of a mixture are spread. "
        "Tokens travel to the process of their expert. 1: every process computes all experts of its tokens.",
    )
    cp: Positive = Field(
        1,
        description="Context parallelism (Ulysses): neighboring processes that share each packed micro-batch. Each "
        "computes a part of its tokens, and attention for a part of the heads. 1: every process has its own samples.",
    )


class TrainingConfig(Section):
    """Steps, batches, memory and checkpoints of training."""

    steps: NotNegative = Field(
        1000,
        description="Steps of RL; each trains one batch. 0: no RL: the run is the SFT phase (training.sft) "
        "alone, with the trainer as the only role.",
    )
    prompts_per_step: Positive = Field(32, description="Groups (prompts) in a batch, which one step trains.")
    max_lag: NotNegative = Field(
        4, description="Largest number of steps between the sampling weights and the trained weights."
    )
    stale: Literal["refuse", "mask"] = Field(
        "refuse",
        description="Policy for groups with tokens older than max_lag. `refuse`: sample the group again. `mask`: "
        "exclude the stale tokens from the loss; a group without fresh tokens is still sampled again.",
    )
    update_epochs: Positive = Field(1, description="Passes over each batch.")
    mini_batches: Positive = Field(
        1, description="Optimizer steps in each pass; each trains the same number of the batch's prompts."
    )
    micro_batch_tokens: Positive = Field(
        16384,
        description="Token budget of a micro-batch in one process, including padding; a shared prefix counts for "
        "each of its samples. With training.mesh.cp a micro-batch has the budgets of that many processes.",
    )
    micro_batch_rows: NotNegative = Field(
        0, description="Largest number of samples in a micro-batch; 0: limited by the token budget only."
    )
    packing: bool = Field(
        True,
        description="Pack samples without padding, with attention inside each sample. A model with layers that "
        "would carry a state between packed samples is always padded, with a warning.",
    )
    share_prefixes: bool | None = Field(
        None,
        description="Compute a common prefix of several samples in a micro-batch, such as their prompt, once, if "
        "samples are packed. Unset: on for CPUs without compiled layers.",
    )
    routing_replay: Literal["none", "rollout"] = Field(
        "none",
        description="Experts of a mixture's tokens in the trainer: those that its routers choose (`none`), or those "
        "that the server chose when it sampled (`rollout`, also called R3).",
    )
    zero_variance_groups: Literal["auto", "keep", "drop"] = Field(
        "auto",
        description="Groups whose samples all have the same reward: `keep` them, or `drop` them and sample others in "
        "their place. `auto`: drop them if they have no gradient, as with a group's baseline without a KL, an entropy "
        "bonus or a teacher.",
    )
    max_dropped_batches: NotNegative = Field(
        3,
        description="Largest number of groups with equal rewards that one step drops, in batches of prompts_per_step; "
        "more of them fill the batch.",
    )
    mask_truncated: bool = Field(
        False,
        description="Exclude the tokens of truncated samples from the loss (DAPO's overlong filtering); their rewards "
        "always count.",
    )
    overlong_buffer: Fraction = Field(
        0.0,
        description="Soft overlong punishment (DAPO): in this last fraction of rollout.max_tokens a penalty of a "
        "sample's reward rises from 0 to overlong_penalty. 0: none.",
    )
    overlong_penalty: Annotated[float, Field(ge=0)] = Field(
        1.0, description="The penalty of a sample that was truncated, with overlong_buffer above 0."
    )
    activation_checkpointing: Recomputation = Field(
        "none",
        description="Activations that the backward pass recomputes instead of keeping them: `none`; `selective`, those "
        "that are cheap to compute (all but the outputs of attention and of expensive matrix products); or `full`, "
        "all of each layer.",
    )
    compile: bool = Field(False, description="Compile the model's layers (torch.compile).")
    reshard_after_forward: bool = Field(
        False,
        description="Reshard parameters and gradients after every pass through a layer (ZeRO-3): less memory. "
        "Otherwise every rank holds both whole from the first micro-batch of an operation to its last (ZeRO-2).",
    )
    mesh: MeshConfig = MeshConfig()
    memory: Literal["explicit", "auto"] = Field(
        "explicit",
        description="A trainer that does not fit into resources.gpu_memory is refused (`explicit`), or training's keys "
        "reshard_after_forward, activation_checkpointing, micro_batch_tokens and staging_device are chosen so that it "
        "fits (`auto`), except those that differ from their defaults.",
    )
    offload_idle_models: bool = Field(
        False,
        description="Keep only the computing model on the device; the others are offloaded to host memory or disk.",
    )
    staging_device: Literal["gpu", "host"] = Field(
        "gpu",
        description="Memory for weights that wait for servers on GPUs, a part on each trainer process: its `gpu`, or "
        "its `host`, which is slower.",
    )
    metrics: Literal["none", "basic", "with_entropy"] = Field(
        "basic", description="Level of the metrics of each batch; see docs/metrics.md."
    )
    eval_every: NotNegative = Field(
        25, description="Steps between held-out evaluations; 0: only at the first and the last step."
    )
    keep_best: bool = Field(
        True, description="Keep the model with the lowest held-out loss as `best/`, if SFT has held-out rows."
    )
    checkpoint_every: Positive = Field(50, description="Largest number of steps between checkpoints.")
    checkpoint_seconds: Annotated[float, Field(ge=0)] = Field(
        600,
        description="Largest time between checkpoints, in seconds: a checkpoint follows the step in which it "
        "elapses. 0: no limit.",
    )
    checkpoints: str = Field(
        "", description="URL for the checkpoints, of any kind that fsspec supports; empty: in the run directory."
    )
    async_checkpoints: bool = Field(True, description="Continue training while a checkpoint is written.")
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(2, description="Number of complete checkpoints to keep.")
    data_seconds: Seconds = Field(
        600,
        description="Longest time without progress while the trainer waits for a batch: no group arrives, and no "
        "episode samples a token or ends a call of its task. Then the run fails. Slow episodes that advance never do.",
    )
    sft: SftPhaseConfig = SftPhaseConfig()
    jobs: str = Field(
        "",
        description="A job file, or a folder of job files, for the trainer to execute (docs/jobs.md); the run then "
        "has no other steps.",
    )

    @property
    def micro_batch_budget(self) -> int:
        """Maximum tokens of a micro-batch, summed over the processes that share it (`mesh.cp`)."""
        return self.micro_batch_tokens * self.mesh.cp

    @property
    def masked_finish(self) -> str | None:
        """The finish reason of samples that are excluded from the loss; None if no sample is."""
        return "length" if self.mask_truncated else None
