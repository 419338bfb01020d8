"""The charts of the numbers over the steps.

Owns which numbers are drawn together and how. Promises one `Chart` for each subject, which holds either an SVG or the
reason why there is none. Must not know files or HTML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.drawing import BAD, INK, LINE, SERIES, draw
from pipeline.report.history import History
from pipeline.rundir.metrics import Row, series

_WIDTH, _HEIGHT = 5.2, 2.3
_KINDS = {"sft": "SFT", "rl": "RL"}
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Chart:
    """One chart: a title, one line that says how to read it, and its SVG, or what is missing."""

    title: str
    note: str
    svg: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Curve:
    """One line of a chart. `smooth` averages over that many neighbours on each side, with the raw line pale behind."""

    name: str
    points: Points
    smooth: int = 0
    marks: bool = False


def all_charts(history: History) -> list[Chart]:
    """Every chart of a run, in the order of the page."""
    rows = history.rows
    if history.config and history.config.evaluation.alone:
        return []
    if history.config and not history.config.has_rollouts:
        return [chart for job, name in _KINDS.items() for chart in _of_trainer(rows, job, name)] or [_no_steps()]
    resumes = resume_steps(rows)
    return [
        _reward(rows, resumes),
        _accuracy(rows, resumes),
        _lag(rows, resumes, history.config.training.max_lag if history.config else None),
        _throughput(rows, resumes, "rl"),
        _idle(rows, resumes),
        _sync(rows, resumes),
        *([_loss(rows, (), "sft", "Warm start")] if series(rows, "loss", job="sft") else []),
    ]


def _of_trainer(rows: list[Row], job: str, name: str) -> list[Chart]:
    """The charts of one kind of job in a run that has a trainer only; none if it did no step of it."""
    if not any(row["job"] == job for row in rows):
        return []
    resumes = resume_steps(rows, job)
    return [_loss(rows, resumes, job, f"Loss of {name}"), _throughput(rows, resumes, job)]


def _no_steps() -> Chart:
    return _chart("Loss", "Of every step.", [], (), "loss")


def resume_steps(rows: Iterable[Row], job: str = "rl") -> list[int]:
    """The steps of a job at which another attempt took over."""
    mine = [row for row in rows if row["kind"] == "train" and row["job"] == job]
    return [later["step"] for earlier, later in pairwise(mine) if earlier.get("attempt") != later.get("attempt")]


def smoothed(points: Points, width: int) -> Points:
    """Each value averaged with up to `width` neighbours on each side, as many on the left as on the right."""
    values = [value for _, value in points]
    reach = (min(width, place, len(values) - 1 - place) for place in range(len(values)))
    windows = (values[place - side : place + side + 1] for place, side in enumerate(reach))
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def _reward(rows: list[Row], resumes: Sequence[int]) -> Chart:
    curves = [_smooth_curve("mean reward", series(rows, "reward/mean"))]
    return _chart("Reward", "Mean reward of the samples that each step trained.", curves, resumes, "reward/mean")


def _accuracy(rows: list[Row], resumes: Sequence[int]) -> Chart:
    names = sorted({row["set"] for row in rows if "set" in row})
    curves = [Curve("held out", series(rows, "eval/accuracy"), marks=True)]
    curves += [Curve(name, series(rows, f"eval/{name}/accuracy"), marks=True) for name in names[: len(SERIES) - 1]]
    note = "Mean reward on prompts that are never trained: greedy, and of evaluation sets as they say."
    return _chart("Held-out accuracy", note, curves, resumes, "eval/accuracy", percent=True)


def _lag(rows: list[Row], resumes: Sequence[int], limit: int | None) -> Chart:
    curves = [Curve("most", series(rows, "lag/max")), Curve("mean", series(rows, "lag/mean"))]
    bound = "" if limit is None else f" The dashed line is max_lag = {limit}."
    note = f"Steps between the weights that sampled and those that train.{bound}"
    return _chart("Lag", note, curves, resumes, "lag/mean, lag/max", limit=limit)


def _throughput(rows: list[Row], resumes: Sequence[int], job: str) -> Chart:
    curves = [_smooth_curve("tokens/s", series(rows, "tokens_per_second", job=job))]
    note = "Tokens trained a second, over whole steps: waits and weight sync included."
    return _chart("Throughput", note, curves, resumes, "tokens_per_second")


def _idle(rows: list[Row], resumes: Sequence[int]) -> Chart:
    names = sorted({name for row in rows for name in row if name.startswith("idle/")}, key=_idle_order)
    curves = [_smooth_curve(name.removeprefix("idle/"), series(rows, name)) for name in names[: len(SERIES)]]
    note = (
        "Share of the time that each waits: the trainer for data (of the whole step), the servers for requests and the "
        "actor for room (of the second before the step's end)."
    )
    return _chart("Idle", note, curves, resumes, "idle/trainer", percent=True)


def _sync(rows: list[Row], resumes: Sequence[int]) -> Chart:
    points = series(rows, "sync/seconds")
    note = "Seconds that the trainer spent on handing its weights over and on waiting for the servers to take them."
    return _chart("Weight sync", note, [_smooth_curve("seconds", points)], resumes, "sync/seconds")


def _loss(rows: list[Row], resumes: Sequence[int], job: str, title: str) -> Chart:
    held_out = Curve("held out", series(rows, "eval/loss", job=job), marks=True)
    curves = [_smooth_curve("loss", series(rows, "loss", job=job)), held_out]
    sft = "Cross-entropy (nats a token) of what is shown to the model."
    return _chart(title, sft if job == "sft" else "The policy loss of each step.", curves, resumes, "loss")


def _idle_order(name: str) -> tuple[bool, str]:
    return name != "idle/trainer", name


def _smooth_curve(name: str, points: Points) -> Curve:
    return Curve(name, points, smooth=len(points) // 40)


def _chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    resumes: Sequence[int],
    names: str,
    *,
    percent: bool = False,
    limit: int | None = None,
) -> Chart:
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return Chart(title, note, missing=f"metrics.jsonl has no {names} yet")

    def paint(axes: Axes) -> None:
        for curve, colour in zip(drawn, SERIES, strict=False):
            _paint_curve(axes, curve, colour)
        _paint_frame(axes, percent, whole=limit is not None, many=len(drawn) > 1)
        for step in resumes:  # between the last step of the one attempt and the first of the next
            axes.axvline(step - 0.5, color=LINE, linewidth=1.2, linestyle=(0, (2, 2)), zorder=0)
        if limit is not None:
            axes.axhline(limit, color=BAD, linewidth=1, linestyle=(0, (4, 3)))

    return Chart(title, note, svg=draw(_WIDTH, _HEIGHT, paint, _spoken(title, drawn)))


def _paint_curve(axes: Axes, curve: Curve, colour: str) -> None:
    steps, values = zip(*curve.points, strict=True)
    if curve.smooth:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
        steps, values = zip(*smoothed(curve.points, curve.smooth), strict=True)
    marker = "o" if curve.marks or len(steps) == 1 else None
    axes.plot(steps, values, color=colour, label=curve.name, marker=marker, markersize=4)
    if curve.marks:
        text = f"{values[-1]:.1%}"
        axes.annotate(text, (steps[-1], values[-1]), (0, 6), textcoords="offset points", ha="right", color=INK)


def _paint_frame(axes: Axes, percent: bool, whole: bool, many: bool) -> None:
    low, high = axes.get_ylim()
    bottom = 0.0 if axes.dataLim.y0 >= 0 else low
    axes.set_ylim(bottom, high + 0.08 * (high - bottom))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=whole))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if many:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(SERIES), borderpad=0, borderaxespad=0.2)


def _spoken(title: str, curves: Sequence[Curve]) -> str:
    ends = (f"{curve.name} from {curve.points[0][1]:.3g} to {curve.points[-1][1]:.3g}" for curve in curves)
    return f"{title}: {'; '.join(ends)}"
