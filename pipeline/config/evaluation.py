"""The keys of evaluations beside that of the run's own held-out prompts.

Owns `evaluation.*`, and the rules between the keys of a set. The run's own held-out prompts need no key here: they are
asked greedily every `training.eval_every` steps.

    evaluation:
      sets:
        hard: {task: {name: countdown, options: {numbers: 4}}, every: 50}
        sampled: {samples: 8, temperature: 0.8, pass_at: [1, 4, 8]}       # the run's own held-out prompts again
"""

from typing import Annotated

from pydantic import Field

from pipeline.config.tasks import RewardConfig, TaskConfig
from pipeline.config.values import KEY_NAME_FORM, NotNegative, Positive, Seconds, Section
from pipeline.errors import ConfigError

SETS = "evaluation.sets."
OWN_SET = "held_out"
"""What the run's own held-out prompts are called where sets are listed."""


class EvalSetConfig(Section):
    """An evaluation set: what is asked, how it is sampled, when, and how long that may take."""

    task: TaskConfig | None = Field(
        None, description="The task whose held-out prompts are asked, as `task.*`; empty: the run's own."
    )
    reward: RewardConfig = Field(RewardConfig(), description="What its answers are worth, with a task of its own.")
    prompts: NotNegative = Field(0, description="How many of the held-out prompts, the first; 0: all.")
    samples: Positive = Field(1, description="Samples of each prompt.")
    pass_at: tuple[Positive, ...] = Field((), description="Each k for which pass@k is measured.")
    correct: float = Field(1.0, description="Least reward of a sample that counts as correct for pass@k.")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="Sampling temperature; 0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample from the fewest tokens that have this probability together."
    )
    top_k: NotNegative = Field(0, description="Sample from so many of the likeliest tokens; 0: from all.")
    max_tokens: NotNegative = Field(0, description="Most tokens sampled in one turn; 0: rollout.max_tokens.")
    every: NotNegative | None = Field(
        None, description="Steps between its evaluations; 0: only first and last; empty: training.eval_every."
    )
    seconds: Seconds = Field(
        1800, description="Deadline of one evaluation; prompts that are not done by then count as failed."
    )


class EvaluationConfig(Section):
    """Evaluation sets beside the run's own held-out prompts, by name; see docs/evaluation.md."""

    own: bool = Field(True, description="Whether the run's own held-out prompts are asked, beside the sets.")
    alone: bool = Field(
        False, description="Whether this run trains nothing and evaluates its model; `launchers/evaluate.py` starts it."
    )
    step: NotNegative = Field(0, description="Of such a run: the step of training that its model is of.")
    command: tuple[str, ...] = Field(
        (),
        description="Of such a run: a command that it runs against its servers after the sets, such as a benchmark's "
        "harness; `{url}`, `{model}` and `{output}` stand for where and what to ask, and where to write.",
    )
    command_seconds: Seconds = Field(14400, description="Deadline of that command, anew in each attempt.")
    sets: dict[Annotated[str, Field(pattern=KEY_NAME_FORM)], EvalSetConfig] = Field(
        default_factory=dict, description="The sets by name; each has the keys of the next section."
    )


def check_sets(evaluation: EvaluationConfig, max_length: int, longest_turn: int) -> None:
    """`ConfigError` for the first set that cannot be asked; `longest_turn` is what a set without `max_tokens` has."""
    if evaluation.alone and not evaluation.own and not evaluation.sets:
        raise ConfigError("evaluation.own", False, "true where there is no set", "name one: evaluation.sets.<name>.…")
    for name, each in evaluation.sets.items():
        if name == OWN_SET:
            raise ConfigError(
                f"{SETS}{name}", "a set", "another name: so the run's own prompts are called", "rename it"
            )
        _check_sampling(f"{SETS}{name}", each)
        most = each.max_tokens or longest_turn
        if most >= max_length:
            expected = f"less than model.max_length ({max_length}), which holds the prompt too"
            raise ConfigError(f"{SETS}{name}.max_tokens", most, expected, "lower it or raise model.max_length")
        if each.task is None and each.reward != RewardConfig():
            expected = "nothing where a set has no task of its own: the run's reward counts"
            raise ConfigError(f"{SETS}{name}.reward", "set", expected, f"leave it out, or set {SETS}{name}.task.name")


def _check_sampling(key: str, each: EvalSetConfig) -> None:
    most = max(each.pass_at, default=1)
    if each.samples < most:
        raise ConfigError(f"{key}.samples", each.samples, f"at least {most}, as its pass_at asks for", "raise it")
    drawn = {"samples": each.samples > 1, "top_p": each.top_p < 1, "top_k": each.top_k > 0}
    wrong = next((name for name, asked in drawn.items() if asked), None)
    if wrong is not None and not each.temperature:
        expected = "its default with temperature=0, where all samples of a prompt are alike"
        raise ConfigError(f"{key}.{wrong}", getattr(each, wrong), expected, f"set {key}.temperature=0.8, say")
