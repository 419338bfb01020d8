"""Which numbers of a run are drawn.

Owns the subjects of the charts, their order and their sections. Promises that a number which the run did not measure is
left out, with a line in `unmeasured` where a key measures it, and that fractions alone are shown in percent. Must not
know how curves are painted.
"""

from collections.abc import Sequence

from pipeline.config import RunConfig
from pipeline.environments.rewards import names_of
from pipeline.observability.metric_charts import Chart, Curve, chart, resume_steps, smooth_curve
from pipeline.observability.run_history import History
from pipeline.observability.svg_drawing import SERIES
from pipeline.run.metrics_log import MetricRecord, series

LEARNING, OPTIMIZATION, SPEED, WARM_START = "Learning", "Optimization", "Speed", "Warm start"
NUMBERS = "Numbers"
"""The one section of a run with a trainer only."""
_KINDS = {"sft": "SFT", "rl": "RL"}
Rows = Sequence[MetricRecord]


def all_charts(history: History) -> list[Chart]:
    """Every chart of a run, in the order of the page."""
    rows, config = history.rows, history.config
    if config and config.evaluation.only:
        return []
    if config and not config.has_rollouts:
        found = [chart for job, name in _KINDS.items() if _has(rows, job) for chart in _of_trainer(rows, job, name)]
        return found or [chart("Loss", "Of every step.", [], (), "loss", section=NUMBERS)]
    resumes = resume_steps(rows)
    return [
        *_learning(rows, resumes, config),
        *_optimization(rows, resumes, config),
        _lag(rows, resumes, config),
        _throughput(rows, resumes, "rl", SPEED),
        _idle(rows, resumes),
        _sync(rows, resumes),
        *(_loss_and_gradient(rows, resume_steps(rows, "sft"), "sft", WARM_START) if _has(rows, "sft") else []),
    ]


def unmeasured(history: History) -> list[str]:
    """What a run of RL could measure besides, as `entropy: training.metrics=with_entropy`."""
    config, rows = history.config, history.rows
    if config is None or not config.has_rollouts or config.evaluation.only or not _has(rows, "rl"):
        return []
    keys = {
        "entropy": "entropy: training.metrics=with_entropy",
        "reference_kl": "KL to a reference model: loss.kl above 0",
    }
    return [key for name, key in keys.items() if not series(rows, name)]


def measures_accuracy(config: RunConfig | None, rows: Rows, name: str = "") -> bool:
    """Whether the held-out reward of a set is the share of right answers: not where functions of the user's give it,
    nor where it leaves the range of a share."""
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
    """The charts of one kind of job in a run that has a trainer only."""
    resumes = resume_steps(rows, job)
    found = _loss_and_gradient(rows, resumes, job, NUMBERS, f" of {name}")
    return [*found, _throughput(rows, resumes, job, NUMBERS)]


def _learning(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    mean, deviation = smooth_curve("mean", series(rows, "reward/mean")), series(rows, "reward/std")
    curves = [mean, *([smooth_curve("standard deviation", deviation)] if deviation else [])]
    note = "Of the samples that each step trained."
    return [
        chart("Reward", note, curves, resumes, "reward/mean", section=LEARNING),
        *_functions(rows, resumes, config),
        *_eval_charts(rows, resumes, config),
        *_optional(
            "Completion length",
            "Tokens that the policy sampled, of the samples that each step trained.",
            {"mean": "completion_length/mean", "longest": "completion_length/max"},
            (rows, resumes, LEARNING),
        ),
        *_optional(
            "Groups and samples that teach little",
            "Groups whose samples all have the same reward, which gives no advantage; samples cut off at "
            "rollout.max_tokens.",
            {"equal rewards": "groups/zero_variance", "cut off": "samples/truncated"},
            (rows, resumes, LEARNING),
            percent=True,
        ),
    ]


def _functions(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    """A curve for each reward function, or part of an environment's reward; so many in a chart as there are colours."""
    found = {name for row in rows for name in row if name.startswith("rewards/") and name.count("/") == 1}
    names = sorted(name.removeprefix("rewards/") for name in found)
    charts = []
    for first in range(0, len(names), len(SERIES)):
        shown = names[first : first + len(SERIES)]
        curves = [smooth_curve(name, series(rows, f"rewards/{name}")) for name in shown]
        note = f"Mean score of each, before its weight{_weights(config)}."
        title = "Reward functions" if not first else f"Reward functions, from {shown[0]} on"
        charts.append(chart(title, note, curves, resumes, "rewards/", section=LEARNING))
    return charts


def _weights(config: RunConfig | None) -> str:
    """` (exact 1, short 0.5)`."""
    if config is None or not config.reward.functions:
        return ""
    names = names_of(config.reward.functions)
    weights = config.reward.weights or (1.0,) * len(names)
    return f" ({', '.join(f'{name} {weight:g}' for name, weight in zip(names, weights, strict=True))})"


def _eval_charts(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> list[Chart]:
    """Accuracies in percent, and rewards that are none as they are."""
    names = ["", *sorted({row["set"] for row in rows if row.get("set")})]
    accuracies = [name for name in names if measures_accuracy(config, rows, name)]
    others = [name for name in names if name not in accuracies]
    note = "Mean reward on prompts that are never trained: greedy, and of evaluation sets as they say."
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
    held = "Tokens that the clip holds; above and below its bounds."
    clip = {"all": "clip_fraction", "above": "clip_fraction_high", "below": "clip_fraction_low"}
    divergences = {
        "to the reference": "reference_kl",
        "trainer ∥ sampler": "mismatch_kl",
        "within the step": "ratio_kl",
    }
    place = (rows, resumes, OPTIMIZATION)
    return [
        *_loss_and_gradient(rows, resumes, "rl", OPTIMIZATION),
        *_optional(
            "KL", "Nats a token, estimated on the sampled ones; docs/metrics.md has each formula.", divergences, place
        ),
        *_optional("Clip fraction", held, clip, place, percent=True),
        *_optional("Entropy", "Nats a token, over the whole vocabulary.", {"entropy": "entropy"}, place),
    ]


def _loss_and_gradient(rows: Rows, resumes: Sequence[int], job: str, section: str, of: str = "") -> list[Chart]:
    held_out = Curve("held out", series(rows, "eval/loss", job=job), marks=True)
    curves = [smooth_curve("loss", series(rows, "loss", job=job)), held_out]
    sft = "Cross-entropy (nats a token) of what is shown to the model."
    note = sft if job == "sft" else "The policy loss, which is no measure of success."
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
    place: tuple[Rows, Sequence[int], str],
    *,
    percent: bool = False,
) -> list[Chart]:
    """The chart of the numbers of RL that were measured, by what they are called in it; none if none was."""
    rows, resumes, section = place
    curves = [smooth_curve(word, points) for word, name in names.items() if (points := series(rows, name))]
    if not curves:
        return []
    return [chart(title, note, curves, resumes, "", percent=percent, section=section)]


def _lag(rows: Rows, resumes: Sequence[int], config: RunConfig | None) -> Chart:
    limit = config.training.max_lag if config else None
    curves = [Curve("most", series(rows, "staleness/max")), Curve("mean", series(rows, "staleness/mean"))]
    bound = "" if limit is None else f" The dashed line is max_lag = {limit}."
    note = f"Steps between the weights that sampled and those that train.{bound}"
    return chart("Lag", note, curves, resumes, "staleness/mean, staleness/max", limit=limit, section=SPEED)


def _throughput(rows: Rows, resumes: Sequence[int], job: str, section: str) -> Chart:
    curves = [smooth_curve("tokens/s", series(rows, "tokens_per_second", job=job))]
    note = "Tokens trained a second, over whole steps: waits and weight sync included."
    return chart("Throughput", note, curves, resumes, "tokens_per_second", section=section)


def _idle(rows: Rows, resumes: Sequence[int]) -> Chart:
    names = sorted({name for row in rows for name in row if name.startswith("idle/")}, key=_idle_order)
    curves = [smooth_curve(name.removeprefix("idle/"), series(rows, name)) for name in names[: len(SERIES)]]
    note = (
        "Share of the time that each waits: the trainer for data (of the whole step), the servers for requests and the "
        "actor for room (of the second before the step's end)."
    )
    return chart("Idle", note, curves, resumes, "idle/trainer", percent=True, section=SPEED)


def _sync(rows: Rows, resumes: Sequence[int]) -> Chart:
    points = series(rows, "sync/seconds")
    note = "Seconds that the trainer spent on handing its weights over and on waiting for the servers to take them."
    return chart("Weight sync", note, [smooth_curve("seconds", points)], resumes, "sync/seconds", section=SPEED)


def _idle_order(name: str) -> tuple[bool, str]:
    return name != "idle/trainer", name
