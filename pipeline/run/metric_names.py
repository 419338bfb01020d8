"""The names of the run's own metrics, which no sample can report.

Owns the rule for the metrics of samples, which tasks, agents and reward functions name as they like: a name of the
run's own metrics, or one in a namespace of them, is recorded below `task/`, with a warning. Else an agent could report
the accuracy of an evaluation, or the step of a record. Pure, except for the warning.
"""

import logging
from collections.abc import Collection, Mapping

log = logging.getLogger(__name__)

HEAD = frozenset({"kind", "job", "step", "time", "attempt", "set", "file", "written", "done", "of"})
"""Fields of a record of `metrics.jsonl` that are no metrics (`pipeline.run.metrics_log`)."""
_LOSS = """accuracy advantage advantage_std clip_fraction clip_fraction_high clip_fraction_low completions entropy ess
flops grad_norm grad_norm_max kl log_ratio log_ratio_max logprob loss loss_scale lr margin mfu mismatch mismatch_kl
mismatch_max optimizer_steps overflows pairs ratio ratio_kl ratio_max ratio_min reference_kl samples skipped support_kl
support_mass support_teacher_mass tis_ess tis_fraction tis_weight tokens_per_second tokens_per_second_per_process"""
_EVALUATION = "accuracy completions failed loss pairs prompts samples seconds stderr timed_out tokens"
"""Names after `eval/`, where the metrics of samples are too."""
NAMES = HEAD | {*_LOSS.split(), *_EVALUATION.split(), "version_min", "version_max"}
_SPACES = """checkpoint completion_length concurrency critic eval experts goodput groups idle logprob oversample
prefix_cache preference reward routing samples seconds sft speculation staleness start sync tokens"""
NAMESPACES = frozenset(_SPACES.split())
"""What stands before the slash in names such as `reward/mean`."""
PASS_AT = "pass@"
OF_PART = frozenset({"accuracy", "stderr", "prompts", "failed"})
"""Names after the label of a task of a mix."""
_warned = set[str]()


def is_run_metric(name: str) -> bool:
    """Whether `name` is one of the run's own metrics (`docs/metrics.md`), with or without `eval/`.

    >>> [is_run_metric(name) for name in ("loss", "accuracy", "reward/mean", "rewards/exact", "steps")]
    [True, True, True, False, False]
    """
    namespace, slash, _ = name.partition("/")
    return name in NAMES or name.startswith(PASS_AT) or bool(slash and namespace in NAMESPACES)


def below_task(metrics: Mapping[str, float], labels: Collection[str] = ()) -> dict[str, float]:
    """The metrics of samples, with a name of the run's own below `task/`. Warns once for each such name or namespace.

    `labels` are those of a mix's tasks, whose accuracies are the run's own too.

    >>> below_task({"accuracy": 0.5, "moves": 3.0})
    {'task/accuracy': 0.5, 'moves': 3.0}
    """
    own = [name for name in metrics if is_run_metric(name) or _is_of_part(name, labels)]
    for name in own:
        known = name if name in NAMES else name.partition("/")[0]
        if known not in _warned:
            _warned.add(known)
            log.warning("the metric %s of samples is recorded as task/%s: the run has its own of that name", name, name)
    return {f"task/{name}" if name in own else name: value for name, value in metrics.items()}


def _is_of_part(name: str, labels: Collection[str]) -> bool:
    label, _, rest = name.rpartition("/")
    return label in labels and rest in OF_PART
