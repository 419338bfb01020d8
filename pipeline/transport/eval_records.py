"""The records of evaluations: the trainer's request, and the actor's result.

Owns their fields, and the names under which an actor reports a running evaluation.
"""

import msgspec

from pipeline.transport.sample_records import Record

EVALUATED, ASKED = "evaluation/done", "evaluation/prompts"
"""Names under which an actor reports a running evaluation: the number of prompts done, and of all prompts."""


class EvalRequest(Record, frozen=True, kw_only=True, tag="eval_request"):
    """The trainer requests the accuracy of a policy version on an evaluation set; empty: the run's held-out prompts."""

    id: str
    policy_version: int
    set: str = ""


class EvalPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an evaluation that belongs to one task of a mix; attributes as in `EvalResult`."""

    accuracy: float | None
    error: float | None
    prompts: int
    failed: int


class EvalResult(Record, frozen=True, kw_only=True, tag="eval_result"):
    """The result of one `EvalRequest`.

    Attributes:
        accuracy: mean over the prompts of the mean reward of their samples, without the failed ones; None if all or
            more than `evaluation.max_failed_fraction` of the samples failed.
        error: standard error of that mean over the prompts; None with fewer than two prompts that have a sample.
        prompts, samples: the number of prompts, and of samples per prompt, including failed ones.
        failed: number of failed samples, which do not count above; `timed_out` of them missed the deadline.
        version_min, version_max: oldest and newest policy version that sampled; −1 without any sample.
        seconds: duration.
        pass_at: pass@k by k, over the prompts with at least k successful samples; a k without such a prompt is missing.
        metrics: means over the successful samples; empty without an accuracy.
        parts: the results of the tasks of a mix by their labels; empty for another task.
    """

    id: str
    policy_version: int
    accuracy: float | None
    prompts: int
    version_min: int
    version_max: int
    seconds: float
    failed: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    set: str = ""
    samples: int = 1
    timed_out: int = 0
    error: float | None = None
    pass_at: dict[int, float] = msgspec.field(default_factory=dict)
    parts: dict[str, EvalPart] = msgspec.field(default_factory=dict)
