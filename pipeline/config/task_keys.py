"""The keys of the task, its rewards, and a teacher: `task.*`, `reward.*` and `teacher.*`.

An evaluation set has `task` and `reward` too. Each task validates its options itself.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.value_types import (
    LABEL_PATTERN,
    BytesOrNone,
    NotNegative,
    Numbers,
    Positive,
    Seconds,
    Section,
    Texts,
)

MIX = "mix"
"""The name of the task that consists of others."""


class MixedTaskConfig(Section):
    """A task of a mix. `<name>` is its number in the list, counted from 0."""

    name: str = Field(description="A built-in task, or `package.module:Class` of a custom one.")
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Its share of the prompts, relative to the other weights."
    )
    label: Annotated[str, Field(pattern=LABEL_PATTERN)] = Field(
        "", description="Its name in metrics; empty: the name of the task. Two tasks of one name need it."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the task, which validates them.")

    @property
    def title(self) -> str:
        """The label, or without one the name of the task or its class."""
        return self.label or self.name.rpartition(":")[2]


def _by_name(value: object) -> object:
    """A task that is given by its name alone."""
    return {"name": value} if isinstance(value, str) else value


class SandboxConfig(Section):
    """How a task runs code of the policy."""

    kind: Literal["namespaces", "bubblewrap", "podman", "apptainer", "none"] = Field(
        "namespaces",
        description="`namespaces`: in Linux namespaces, without network, other processes and writable files. "
        "`bubblewrap`, `podman`, `apptainer`: the same by the program of that name. A node that cannot do it is "
        "refused. `none`: as an ordinary process of yours, with limits only on time, memory and output.",
    )
    image: str = Field(
        "",
        description="Root file system of the code, with Python: an image (podman), a `.sif` file (apptainer), or an "
        "unpacked directory (bubblewrap, podman, apptainer). Empty: programs and Python of the machine (namespaces, "
        "bubblewrap).",
    )

    @property
    def text(self) -> str:
        """The kind, with the image if there is one."""
        return f"{self.kind} with {self.image}" if self.image else self.kind


class TaskConfig(Section):
    """The task."""

    name: str = Field(
        description="A built-in task, or `package.module:Class` of a custom one; `mix`: those of `task.tasks`."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the task, which validates them.")
    tasks: tuple[Annotated[MixedTaskConfig, BeforeValidator(_by_name)], ...] = Field(
        (),
        description="With `name=mix`: the tasks of the mix, such as `[{name: arithmetic, weight: 2}, {name: countdown, "
        "label: easy, options: {numbers: 3}}]`. A name alone is a task without options.",
    )
    processes: Positive = Field(
        8,
        description="Largest number of the actor's worker processes for prompts and rewards; they start when calls "
        "have to wait.",
    )
    seconds: Seconds = Field(
        60, description="Deadline of one prompt or reward; then its process is stopped, and its sample fails."
    )
    memory_bytes: BytesOrNone = Field(
        1 << 33, description="Memory limit of one worker process; a reward that needs more fails. 0: no limit."
    )
    sandbox: SandboxConfig = SandboxConfig()

    def alone(self) -> "tuple[TaskConfig, ...]":
        """The config of each task of a mix, with the limits of the mix; of another task its own."""
        if self.name != MIX:
            return (self,)
        return tuple(
            self.model_copy(update={"name": entry.name, "options": entry.options, "tasks": ()}) for entry in self.tasks
        )


class RewardModelConfig(Section):
    """A reward model, whose score of the whole conversation is the reward or is added to it. A process of the actor
    computes it on the CPU."""

    path: str = Field(
        "",
        description="Directory of a sequence classifier of transformers with one label, such as the `model/` of "
        "`experiment=reward_model`; empty: none. Without reward.functions its score is the whole reward.",
    )
    weight: float = Field(1.0, description="Factor of its score.")
    max_length: NotNegative = Field(
        0, description="Largest conversation, in its tokens; a longer one fails its sample. 0: the model's positions."
    )
    batch_size: Positive = Field(16, description="Largest number of conversations in one forward pass.")
    seconds: Seconds = Field(60, description="Deadline of a forward pass; then its samples fail.")
    threads: NotNegative = Field(0, description="CPU threads of a forward pass. 0: all CPUs of the actor.")


class RewardConfig(Section):
    """The reward of a sample: the task's own reward, or a weighted sum of Python functions and a reward model."""

    functions: Texts = Field(
        (),
        description="Functions `package.module:function` with the signature of TRL or verl, see docs/rewards.md; "
        "`task` is the task's own reward. Empty: only the task's own reward, or only that of reward.model.",
    )
    weights: Numbers = Field((), description="A weight for each function, in order; empty: 1.")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Additional keywords for a function, by its name."
    )
    calls: Literal["sample", "group"] = Field(
        "sample",
        description="Samples in one call of a function. `sample`: one, so that a failure affects no other sample; "
        "`group`: all samples of a prompt, for functions that compare them.",
    )
    model: RewardModelConfig = RewardModelConfig()

    @property
    def reads_conversations(self) -> bool:
        """Whether the reward needs all turns of a sample. The task's own reward needs the last one only."""
        return bool(self.functions or self.model.path)


class TeacherConfig(Section):
    """A served model that scores the policy's samples: with a teacher `loss.kl` is the divergence from the teacher,
    and there is no reference model. The teacher needs the policy's tokenizer."""

    url: str = Field(
        "",
        description="Base URL of a server with `/completions` and `prompt_logprobs`, such as vLLM; empty: no teacher.",
    )
    model: str = Field("", description="The model's name on the server.")
    key_file: str = Field("", description="File with the server's API key; empty: none.")
    concurrency: Positive = Field(32, description="Largest number of concurrent requests.")
    seconds: Seconds = Field(300, description="Timeout of one request; then it is retried.")
    top_k: NotNegative = Field(
        0,
        description="The loss has the teacher's top_k likeliest tokens at each sampled token, in addition to the "
        "sampled one: the KL over them is a term of the loss. 0: the sampled token only.",
    )
