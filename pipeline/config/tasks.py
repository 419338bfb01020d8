"""The keys that say what is learned, from whom, and what an answer is worth.

Owns `task.*` and `reward.*`, which an evaluation set has too, and `teacher.*`. What a task's own options mean is the
task's matter.
"""

from typing import Any, Literal

from pydantic import Field

from pipeline.config.values import NotNegative, Numbers, Positive, Seconds, Section, Texts


class TaskConfig(Section):
    """What is learned."""

    name: str = Field(description="A built-in task, or `package.module:Class` of your own.")
    options: dict[str, Any] = Field(default_factory=dict, description="The task's own options; the task checks them.")
    processes: Positive = Field(
        8, description="Most processes of the actor that make prompts and rewards; they start when calls have to wait."
    )
    seconds: Seconds = Field(
        60, description="Deadline of one prompt or reward; then its process is ended, and its sample fails."
    )
    memory_bytes: NotNegative = Field(
        1 << 33, description="Most memory of one of these processes; a reward that needs more fails. 0: no bound."
    )
    sandbox: Literal["namespaces", "none"] = Field(
        "namespaces",
        description="How code of the policy is run, where the task runs any: in Linux namespaces, without network, "
        "other processes and writable files, or refused where the kernel gives none; `none`: as any other process of "
        "yours, with bounds on time, memory and output alone.",
    )


class RewardConfig(Section):
    """What a sample is worth: the task's own reward, or a weighted sum of Python functions."""

    functions: Texts = Field(
        (),
        description="Functions `package.module:function` in the signature of TRL or verl, see docs/rewards.md; `task` "
        "is the task's own reward. Empty: that alone.",
    )
    weights: Numbers = Field((), description="A factor for each of them, in order; empty: 1.")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Further keywords for a function, by its name."
    )
    calls: Literal["sample", "group"] = Field(
        "sample",
        description="What one call of a function gets: one sample, so that nothing it does costs another one; or all "
        "samples of a prompt, for functions that compare them.",
    )


class TeacherConfig(Section):
    """A served model that says how likely it finds what the policy sampled: with it `loss.kl` is the divergence from
    that model, and there is no reference model. It needs the policy's tokenizer."""

    url: str = Field(
        "", description="Base URL of a server with `/completions` and `prompt_logprobs`, as vLLM has them; empty: none."
    )
    model: str = Field("", description="The model's name there.")
    key_file: str = Field("", description="A file with the key that the server asks for; empty: none.")
    concurrency: Positive = Field(32, description="Most requests at a time.")
    seconds: Seconds = Field(300, description="Most time of one request; then it is made again.")
