"""The keys of evaluation sets, `evaluation.*`, and the rules between the keys of a set.

The run's built-in held-out prompts need no key: they are evaluated greedily every `training.eval_every` steps.

    evaluation:
      sets:
        hard: {task: {name: countdown, options: {numbers: 4}}, every: 50}
        sampled: {samples: 8, temperature: 0.8, pass_at: [1, 4, 8]}       # the built-in held-out prompts again
"""

from typing import Annotated

from pydantic import Field

from pipeline.config.task_keys import RewardConfig, TaskConfig
from pipeline.config.value_types import KEY_NAME_PATTERN, NotNegative, Positive, Seconds, Section
from pipeline.errors import ConfigError

SETS = "evaluation.sets."
BUILTIN_SET = "held_out"
"""The name of the built-in held-out prompts in lists of sets."""


class EvalSetConfig(Section):
    """An evaluation set: its prompts, sampling, schedule and deadline."""

    task: TaskConfig | None = Field(
        None, description="Task with the held-out prompts, with keys as `task.*`; empty: the run's task."
    )
    reward: RewardConfig = Field(RewardConfig(), description="Rewards of its answers, if the set has a separate task.")
    prompts: NotNegative = Field(0, description="Number of held-out prompts, from the first on; 0: all.")
    samples: Positive = Field(1, description="Samples of each prompt.")
    pass_at: tuple[Positive, ...] = Field((), description="Values of k for which pass@k is measured.")
    correct: float = Field(1.0, description="Smallest reward of a correct sample for pass@k.")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="Sampling temperature; 0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample from the smallest set of tokens with this total probability."
    )
    top_k: NotNegative = Field(0, description="Sample from this many of the likeliest tokens; 0: from all.")
    max_tokens: NotNegative = Field(
        0, description="Largest number of tokens sampled in one turn; 0: rollout.max_tokens."
    )
    every: NotNegative | None = Field(
        None,
        description="Steps between evaluations; 0: only at the first and the last step; empty: training.eval_every.",
    )
    seconds: Seconds = Field(
        1800, description="Deadline of one evaluation; samples of unfinished prompts are failed ones."
    )


class EvaluationConfig(Section):
    """Evaluation sets in addition to the run's held-out prompts, by name; see docs/evaluation.md."""

    builtin_set: bool = Field(True, description="Evaluate the run's built-in held-out prompts in addition to the sets.")
    only: bool = Field(
        False, description="Train nothing and only evaluate the model; `launchers/evaluate.py` starts such a run."
    )
    max_failed_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.25,
        description="Failed samples do not count in an accuracy; with a larger fraction of them an evaluation has no "
        "accuracy, and its log an error.",
    )
    step: NotNegative = Field(0, description="Evaluation-only runs: the training step of the model.")
    command: tuple[str, ...] = Field(
        (),
        description="Evaluation-only runs: a command to run against the servers after the sets, such as a "
        "benchmark's harness; `{url}`, `{model}` and `{output}` are replaced by the servers' URL, the model's name, "
        "and the output folder.",
    )
    command_seconds: Seconds = Field(14400, description="Deadline of this command; each attempt restarts it.")
    sets: dict[Annotated[str, Field(pattern=KEY_NAME_PATTERN)], EvalSetConfig] = Field(
        default_factory=dict, description="The sets by name; each has the keys of the next section."
    )


def check_sets(evaluation: EvaluationConfig, max_length: int, longest_turn: int) -> None:
    """Raise `ConfigError` for the first invalid set. `longest_turn` is the limit of a set without `max_tokens`."""
    if evaluation.only and not evaluation.builtin_set and not evaluation.sets:
        raise ConfigError("evaluation.builtin_set", False, "true without sets", "define one: evaluation.sets.<name>.…")
    for name, eval_set in evaluation.sets.items():
        if name == BUILTIN_SET:
            expected = "another name: it is the name of the run's built-in set"
            raise ConfigError(f"{SETS}{name}", "a set", expected, "rename it")
        _check_sampling(f"{SETS}{name}", eval_set)
        most = eval_set.max_tokens or longest_turn
        if most >= max_length:
            expected = f"less than model.max_length ({max_length}), which holds the prompt too"
            raise ConfigError(f"{SETS}{name}.max_tokens", most, expected, "lower it or raise model.max_length")
        if eval_set.task is None and eval_set.reward != RewardConfig():
            expected = "nothing for a set without a task: the run's reward counts"
            raise ConfigError(f"{SETS}{name}.reward", "set", expected, f"leave it out, or set {SETS}{name}.task.name")


def _check_sampling(key: str, eval_set: EvalSetConfig) -> None:
    most = max(eval_set.pass_at, default=1)
    if eval_set.samples < most:
        raise ConfigError(f"{key}.samples", eval_set.samples, f"at least {most}, the largest of pass_at", "raise it")
    random = {"samples": eval_set.samples > 1, "top_p": eval_set.top_p < 1, "top_k": eval_set.top_k > 0}
    wrong = next((name for name, is_set in random.items() if is_set), None)
    if wrong is not None and not eval_set.temperature:
        expected = "its default with temperature=0, where all samples of a prompt are alike"
        raise ConfigError(f"{key}.{wrong}", getattr(eval_set, wrong), expected, f"set {key}.temperature=0.8, say")
