"""What a trainer is asked to do [D7].

Owns the two kinds of job and which of them a run's config asks for, in order. A job says everything that its execution
needs besides the run itself; `pipeline.training.runner` executes both kinds in the same way.
"""

from dataclasses import dataclass

from pipeline.checkpoints import Job as JobName
from pipeline.config import OptimConfig, RunConfig


@dataclass(frozen=True)
class SftJob:
    """Supervised fine-tuning on the task's demonstrations: `steps` optimizer steps of `batch` of them."""

    steps: int
    batch: int
    optim: OptimConfig

    @property
    def name(self) -> JobName:
        return "sft"


@dataclass(frozen=True)
class RlJob:
    """Reinforcement learning on groups from the actor: `steps` optimizer steps of `prompts` groups."""

    steps: int
    prompts: int
    optim: OptimConfig

    @property
    def name(self) -> JobName:
        return "rl"


Job = SftJob | RlJob


def jobs_of(config: RunConfig) -> tuple[Job, ...]:
    """The jobs of a run, in order: the warm start if it has steps, then RL."""
    training, start = config.training, config.training.warm_start
    rl = RlJob(steps=training.steps, prompts=training.prompts_per_step, optim=config.optim)
    if not start.steps:
        return (rl,)
    optim = config.optim.model_copy(update={"lr": start.lr, "schedule": "constant", "warmup_steps": 0})
    return SftJob(steps=start.steps, batch=start.batch, optim=optim), rl
