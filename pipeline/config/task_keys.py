"""The keys of the task, its rewards, and a teacher: `task.*`, `reward.*` and `teacher.*`.

An evaluation set has `task` and `reward` too. Each task validates its options itself.
"""

from typing import Any, Literal

from pydantic import Field

from pipeline.config.value_types import NotNegative, Numbers, Positive, Seconds, Section, Texts


class TaskConfig(Section):
    """The task."""

    name: str = Field(description="A built-in task, or `package.module:Class` of a custom one.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the task, which validates them.")
    processes: Positive = Field(
        8,
        description="Largest number of the actor's worker processes for prompts and rewards; they start when calls "
        "have to wait.",
    )
    seconds: Seconds = Field(
        60, description="Deadline of one prompt or reward; then its process is stopped, and its sample fails."
    )
    memory_bytes: NotNegative = Field(
        1 << 33, description="Memory limit of one worker process; a reward that needs more fails. 0: no limit."
    )
    sandbox: Literal["namespaces", "none"] = Field(
        "namespaces",
        description="How a task runs code of the policy. `namespaces`: in Linux namespaces, without network, other "
        "processes and writable files; refused if the kernel does not allow namespaces. `none`: as an ordinary "
        "process of yours, with limits only on time, memory and output.",
    )


class RewardConfig(Section):
    """The reward of a sample: the task's own reward, or a weighted sum of Python functions."""

    functions: Texts = Field(
        (),
        description="Functions `package.module:function` with the signature of TRL or verl, see docs/rewards.md; "
        "`task` is the task's own reward. Empty: only the task's own reward.",
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
