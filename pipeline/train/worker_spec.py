"""What a worker is built from.

Owns which models a job has and how each is made: the policy always, or in its place a reward model; a reference model
when the loss has a KL term or compares with one; a critic when the advantages need values. Pure; cheap to pickle.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.config import ModelConfig, OptimConfig, RunConfig
from pipeline.config.learning_rates import critic_learning_rate
from pipeline.config.training_keys import Recomputation

ModelKind = Literal["policy", "critic", "reward_model"]
"""A reward model is a critic that is exported."""

FIRST_SCALE = 1 << 16
"""The first loss scale in float16 of a loss that is a mean over tokens or samples, as in `torch.amp.GradScaler`."""
FIRST_SCALE_OF_SUMS = 1
"""The first loss scale in float16 of a sum over tokens, which is larger than a mean by their number."""


@dataclass(frozen=True)
class ModelSpec:
    """One model of the trainer.

    Attributes:
        kind: what it answers: log-probabilities, or values; a reward model is a critic that is exported.
        model: directory, types, adapters.
        optim: its optimizer; None for a model that is never trained.
        steps: optimizer steps of the job, for the schedule of the learning rate.
        seed: of random weights.
        activation_checkpointing, compile, reshard: as in `training.*`.
        dp_replicate: as in `training.mesh`; groups of neighboring ranks that each hold the whole model.
        ep: as in `training.mesh`; neighboring ranks among which the experts of each layer are spread.
        cp: as there; neighboring ranks that share each micro-batch.
        loss_scale: the first loss scale if the compute type is float16.
        routing_replay: whether the routed experts of rows take the place of its routers' choice.
    """

    kind: ModelKind
    model: ModelConfig
    optim: OptimConfig | None = None
    steps: int = 1
    seed: int = 0
    activation_checkpointing: Recomputation = "none"
    compile: bool = False
    reshard: bool = False
    dp_replicate: int = 1
    ep: int = 1
    cp: int = 1
    loss_scale: int = FIRST_SCALE
    routing_replay: bool = False


def models_of(
    config: RunConfig, job: Literal["sft", "preference", "rl"], optim: OptimConfig, steps: int
) -> dict[str, ModelSpec]:
    """The models of a job by name; `policy` comes first. `steps` counts batches, `optim` is the policy's."""
    training, loss = config.training, config.loss
    per_batch = training.update_epochs * training.mini_batches if job == "rl" else 1

    def spec(kind: ModelKind, model: ModelConfig, optim: OptimConfig | None) -> ModelSpec:
        return ModelSpec(
            kind=kind,
            model=model,
            optim=optim,
            steps=steps * per_batch,
            seed=config.seed,
            activation_checkpointing=training.activation_checkpointing,
            compile=training.compile,
            reshard=training.reshard_after_forward,
            dp_replicate=training.mesh.dp_replicate,
            ep=training.mesh.ep,
            cp=training.mesh.cp,
            routing_replay=kind == "policy" and training.routing_replay == "rollout",
        )

    if job == "preference":
        formula = config.preference.formula
        # A reward model has the name of the trained model too, so that checkpoints and exports treat both alike.
        models = {"policy": spec("reward_model" if formula.is_reward_model else "policy", config.model, optim)}
        return models | ({"reference": spec("policy", config.model, None)} if formula.has_reference else {})
    models = {"policy": spec("policy", config.model, optim)}
    if job == "rl" and config.has_reference:
        models["reference"] = spec("policy", config.model, None)
    if job == "rl" and loss.estimator.has_critic:
        plain = config.model.model_copy(update={"lora": config.model.lora.model_copy(update={"rank": 0})})
        models["critic"] = spec("critic", plain, optim.model_copy(update={"lr": critic_learning_rate(config)}))
    return models
