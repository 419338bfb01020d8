"""The charts of a run: their metrics, their order and their sections.

Metrics that the run did not measure are omitted; `unmeasured` lists those that a key would measure. Only fractions are
shown in percent.
"""

from collections.abc import Sequence

from pipeline.config import RunConfig
from pipeline.environments.rewards import names_of
from pipeline.observability.metric_charts import Chart, Curve, chart, resume_steps, smooth_curve
from pipeline.observability.run_history import History
from pipeline.observability.svg_drawing import SERIES
from pipeline.run.metrics_log import MetricRecord, series

LEARNING, OPTIMIZATION, SPEED, SFT = "Learning", "Optimization", "Speed", "SFT"
NUMBERS = "Numbers"
"""The only section of a run that consists of a trainer."""
_KINDS = {"sft": "SFT", "preference": "preferences", "rl": "RL"}
Rows = Sequence[MetricRecord]


def all_charts(history: History) -> list[Chart]:
    """Every chart of a run, in the order of the page."""
    rows, config = history.rows, history.config
    if config and config.evaluation.only:
        return []
    if config and not config.has_rl:
        charts = [chart for job, name in _KINDS.items() if _has(rows, job) for chart in _of_trainer(rows, job, name)]
        return charts or [chart("Loss", "The loss of each step.", [], (), "loss", section=NUMBERS)]
    resumes = resume_steps(rows)  # of RL; those of SFT are separate
    return [
        *_learning(rows, resumes, config),
        *_optimization(rows, resumes, config),
        _lag(rows, resumes, config),
        _throughput(rows, resumes, "rl", SPEED),
        _idle(rows, resumes),
        *_optional(
            "Groups in flight",
            "Groups in flight in the actor's last report before the step's end, up to 1 s old, and how many the load "
            "of the servers' caches allowed (rollout.adaptive_concurrency).",
            {"in flight": "concurrency/in_flight", "limit": "concurrency/limit"},
            (rows, resumes, SPEED),
        ),
        _sync(rows, resumes),
        *(_loss_and_gradient(rows, resume_steps(rows, "sft"), "sft", SFT) if _has(rows, "sft") else []),
    ]


def unmeasured(history: History) -> list[str]:
    """Unmeasured metrics of an RL run with the key that enables each: `entropy: training.metrics=with_entropy`."""
    config, rows = history.config, history.rows
    if config is None or not config.has_rl or config.evaluation.only or not _has(rows, "rl"):
        return []
    keys = {
        "entropy": "entropy: training.metrics=with_entropy",
        "reference_kl": "KL to a reference model: loss.kl above 0",
    }
    return [key for name, key in keys.items() if not series(rows, name)]


def measures_accuracy(config: RunConfig | None, rows: Rows, name: str = "") -> bool:
    """Whether the held-out reward of a set is the fraction of right answers.

    False if user functions compute it, or if a value is outside of 0 to 1.
    """
    prefix = f"eval/{name}/" if name else "eval/"
    if any(not 0 <= value <= 1 for _, value in series(rows, f"{prefix}accuracy")):
        return False
    reward = config.reward if config else None
    chosen = config.evaluation.sets.get(name) if config and name else None
    if chosen is not None and chosen.task is not None:
        reward = chosen.reward
    return reward is None or not reward.functions


def _has(rows: Rows, job: str) -> bool:
    return any(row["job"] == job for row in rows)


def _of_trainer(rows: Rows, job: str, name: str) -> list[Chart]:
    """The charts of one phase in a run that consists of a trainer."""
    resumes = resume_steps(rows, job)
    charts = _loss_and_gradient(rows, resumes, job, NUMBERS, f" of {name}")
    return [*charts, _throughput(rows, resumes, job, NUMBERS)]


def _learning(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    mean, deviation = smooth_curve("mean", series(rows, "reward/mean")), series(rows, "reward/std")
    curves = [mean, *([smooth_curve("standard deviation", deviation)] if deviation else [])]
    note = "Reward of the samples that each step trained."
    return [
        chart("Reward", note, curves, resumes, "reward/mean", section=LEARNING),
        *_by_task(rows, resumes, config),
        *_functions(rows, resumes, config),
        *_eval_charts(rows, resumes, config),
        *_optional(
            "Completion length",
            "Tokens that the policy sampled, of the samples that each step trained.",
            {"mean": "completion_length/mean", "longest": "completion_length/max"},
            (rows, resumes, LEARNING),
        ),
        *_optional(
            "Groups and samples with little to learn from",
            "Groups whose samples all have the same reward, which gives no advantage; samples cut off at "
            "rollout.max_tokens.",
            {"equal rewards": "groups/zero_variance", "cut off": "samples/truncated"},
            (rows, resumes, LEARNING),
            percent=True,
        ),
    ]


def _by_task(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    """A curve per task of a mix; none without a mix."""
    labels = [entry.title for entry in config.task.tasks] if config else []
    curves = [smooth_curve(label, series(rows, f"reward/{label}")) for label in labels[: len(SERIES)]]
    note = "Mean reward of the samples of each task that each step trained."
    return [chart("Reward by task", note, curves, resumes, "reward/", section=LEARNING)] if curves else []


def _functions(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    """A curve per reward function, or per part of an environment's reward; each chart has at most `len(SERIES)`."""
    metrics = {name for row in rows for name in row if name.startswith("rewards/") and name.count("/") == 1}
    names = sorted(name.removeprefix("rewards/") for name in metrics)
    charts = []
    for first in range(0, len(names), len(SERIES)):
        shown = names[first : first + len(SERIES)]
        curves = [smooth_curve(name, series(rows, f"rewards/{name}")) for name in shown]
        note = f"Mean score of each, before its weight{_weights(config)}."
        title = "Reward functions" if not first else f"Reward functions, from {shown[0]} on"
        charts.append(chart(title, note, curves, resumes, "rewards/", section=LEARNING))
    return charts


def _weights(config: RunConfig | None) -> str:
    """The weights of reward functions for a note, such as ` (exact 1, short 0.5)`; empty without functions."""
    if config is None or not config.reward.functions:
        return ""
    names = names_of(config.reward.functions)
    weights = config.reward.weights or (1.0,) * len(names)
    return f" ({', '.join(f'{name} {weight:g}' for name, weight in zip(names, weights, strict=True))})"


def _eval_charts(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    """The charts of held-out accuracies in percent, and of held-out rewards that are not accuracies."""
    # The results of the tasks of a mix have names such as those of sets: `eval/<label>/accuracy`.
    labels = [entry.title for entry in config.task.tasks] if config else []
    names = ["", *labels, *sorted({row["set"] for row in rows if row.get("set")})]
    accuracies = [name for name in names if measures_accuracy(config, rows, name)]
    others = [name for name in names if name not in accuracies]
    note = "Mean reward on prompts that are never trained: greedy, or with the sampling parameters of the set."
    groups = [("Held-out accuracy", accuracies, True), ("Held-out reward", others, False)]
    charts = []
    for title, chosen, percent in groups:
        curves = [
            Curve(name or "held out", series(rows, f"eval/{name}/accuracy" if name else "eval/accuracy"), marks=True)
            for name in chosen[: len(SERIES)]
        ]
        if any(curve.points for curve in curves) or "" in chosen:
            drawn = chart(title, note, curves, resumes, "eval/accuracy", percent=percent, section=LEARNING)
            charts.append(drawn)
    return charts


def _optimization(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    clipped_note = "Fraction of clipped tokens: all, above and below the bounds."
    clip = {"all": "clip_fraction", "above": "clip_fraction_high", "below": "clip_fraction_low"}
    divergences = {
        "to the reference": "reference_kl",
        "to the teacher's likely tokens": "support_kl",
        "trainer ∥ sampler": "mismatch_kl",
        "within the step": "ratio_kl",
    }
    frame = (rows, resumes, OPTIMIZATION)
    return [
        *_loss_and_gradient(rows, resumes, "rl", OPTIMIZATION),
        *_optional(
            "KL", "Nats a token, estimated on the sampled ones; docs/metrics.md has each formula.", divergences, frame
        ),
        *_optional("Clip fraction", clipped_note, clip, frame, percent=True),
        *_optional("Entropy", "Nats a token, over the whole vocabulary.", {"entropy": "entropy"}, frame),
    ]


def _loss_and_gradient(rows: Rows, resumes: Sequence[int], job: str, section: str, of: str = "") -> list[Chart]:
    held_out = Curve("held out", series(rows, "eval/loss", job=job), marks=True)
    curves = [smooth_curve("loss", series(rows, "loss", job=job)), held_out]
    sft = "Cross-entropy (nats a token) of the training data."
    notes = {"sft": sft, "preference": "Loss of the pairs (preference.loss)."}
    note = notes.get(job, "The policy loss, which does not measure success.")
    gradient = [smooth_curve("norm", series(rows, "grad_norm", job=job))]
    clipped = "L2 norm before it is clipped (optim.clip_norm)."
    charts = [chart(f"Loss{of}", note, curves, resumes, "loss", section=section)]
    if gradient[0].points:
        charts.append(chart(f"Gradient norm{of}", clipped, gradient, resumes, "grad_norm", section=section))
    return charts


def _optional(
    title: str,
    note: str,
    names: dict[str, str],
    frame: tuple[Rows, Sequence[int], str],
    *,
    percent: bool = False,
) -> list[Chart]:
    """A chart of the measured ones of some RL metrics; empty if none was measured.

    `names` maps labels to metrics; `frame` has the rows, the steps of resumes, and the section.
    """
    rows, resumes, section = frame
    curves = [smooth_curve(label, points) for label, name in names.items() if (points := series(rows, name))]
    if not curves:
        return []
    return [chart(title, note, curves, resumes, "", percent=percent, section=section)]


def _lag(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> Chart:
    limit = config.training.max_lag if config else None
    curves = [Curve("most", series(rows, "staleness/max")), Curve("mean", series(rows, "staleness/mean"))]
    bound = "" if limit is None else f" The dashed line is max_lag = {limit}."
    note = f"Steps between the policy version that sampled and the trained one.{bound}"
    return chart("Lag", note, curves, resumes, "staleness/mean, staleness/max", limit=limit, section=SPEED)


def _throughput(rows: Rows, resumes: Sequence[int], job: str, section: str) -> Chart:
    curves = [smooth_curve("tokens/s", series(rows, "tokens_per_second", job=job))]
    note = "Trained tokens per second, over whole steps including waits and weight sync."
    return chart("Throughput", note, curves, resumes, "tokens_per_second", section=section)


def _idle(rows: Rows, resumes: Sequence[int]) -> Chart:
    names = sorted({name for row in rows for name in row if name.startswith("idle/")}, key=_idle_order)
    curves = [smooth_curve(name.removeprefix("idle/"), series(rows, name)) for name in names[: len(SERIES)]]
    note = (
        "Fraction of time spent waiting: the trainer for data (of the whole step), the servers for requests and the "
        "actor for room (of the second before the step's end)."
    )
    return chart("Idle", note, curves, resumes, "idle/trainer", percent=True, section=SPEED)


def _sync(rows: Rows, resumes: Sequence[int]) -> Chart:
    points = series(rows, "sync/seconds")
    note = "Seconds in which the trainer handed its weights over and waited for the servers to load them."
    return chart("Weight sync", note, [smooth_curve("seconds", points)], resumes, "sync/seconds", section=SPEED)


def _idle_order(name: str) -> tuple[bool, str]:
    return name != "idle/trainer", name
