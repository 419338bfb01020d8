"""Charts of metrics over training steps.

A `Chart` has an SVG, or the reason why it has none. `pipeline.observability.chart_subjects` chooses the metrics.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.observability.svg_drawing import BAD, INK, LINE, SERIES, draw
from pipeline.run.metrics_log import MetricRecord

_WIDTH, _HEIGHT = 5.2, 2.3
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Chart:
    """One chart of the report.

    Attributes:
        title, note: the heading, and one line of explanation.
        svg: the drawing; empty if `missing` has the reason why there is none.
        section: the section of the page.
    """

    title: str
    note: str
    svg: str = ""
    missing: str = ""
    section: str = ""


@dataclass(frozen=True)
class Curve:
    """One line of a chart. `smooth` is the number of averaged neighbors on each side; the raw line is drawn pale."""

    name: str
    points: Points
    smooth: int = 0
    marks: bool = False


def resume_steps(rows: Iterable[MetricRecord], job: str = "rl") -> list[int]:
    """The first steps of all attempts but the first, within one phase."""
    mine = [row for row in rows if row["kind"] == "train" and row["job"] == job]
    return [later["step"] for earlier, later in pairwise(mine) if earlier.get("attempt") != later.get("attempt")]


def smoothed(points: Points, width: int) -> Points:
    """Each value averaged with up to `width` neighbors on each side, equally many on both."""
    values = [value for _, value in points]
    reach = (min(width, index, len(values) - 1 - index) for index in range(len(values)))
    windows = (values[index - side : index + side + 1] for index, side in enumerate(reach))
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def smooth_curve(name: str, points: Points) -> Curve:
    """A curve whose averaging width is 1/40 of its number of points."""
    return Curve(name, points, smooth=len(points) // 40)


def chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    resumes: Sequence[int],
    names: str,
    *,
    percent: bool = False,
    limit: int | None = None,
    section: str = "",
) -> Chart:
    """The chart of these curves.

    Args:
        title, note: the heading, and one line of explanation.
        curves: the lines; those without points are omitted.
        resumes: steps at which a new attempt starts, drawn as vertical lines.
        names: the metrics that the chart reports as missing if no curve has a point.
        percent: label fractions in percent.
        limit: an integer bound, drawn as a dashed line.
        section: the section of the page.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return Chart(title, note, missing=f"metrics.jsonl has no {names} yet", section=section)

    def paint(axes: Axes) -> None:
        for curve, color in zip(drawn, SERIES, strict=False):
            _paint_curve(axes, curve, color, percent)
        _paint_frame(axes, percent, whole=limit is not None, many=len(drawn) > 1)
        for step in resumes:  # between the last step of the one attempt and the first of the next
            axes.axvline(step - 0.5, color=LINE, linewidth=1.2, linestyle=(0, (2, 2)), zorder=0)
        if limit is not None:
            axes.axhline(limit, color=BAD, linewidth=1, linestyle=(0, (4, 3)))

    return Chart(title, note, draw(_WIDTH, _HEIGHT, paint, _spoken(title, drawn)), section=section)


def _paint_curve(axes: Axes, curve: Curve, color: str, percent: bool) -> None:
    steps, values = zip(*curve.points, strict=True)
    if curve.smooth:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.9)
        steps, values = zip(*smoothed(curve.points, curve.smooth), strict=True)
    marker = "o" if curve.marks or len(steps) == 1 else None
    axes.plot(steps, values, color=color, label=curve.name, marker=marker, markersize=4)
    if curve.marks:
        text = f"{values[-1]:.1%}" if percent else f"{values[-1]:.3g}"
        axes.annotate(text, (steps[-1], values[-1]), (0, 6), textcoords="offset points", ha="right", color=INK)


def _paint_frame(axes: Axes, percent: bool, whole: bool, many: bool) -> None:
    low, high = axes.get_ylim()
    bottom = 0.0 if axes.dataLim.y0 >= 0 else low
    axes.set_ylim(bottom, high + 0.08 * (high - bottom))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=whole))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if many:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0, borderaxespad=0.2)


def _spoken(title: str, curves: Sequence[Curve]) -> str:
    ends = (f"{curve.name} from {curve.points[0][1]:.3g} to {curve.points[-1][1]:.3g}" for curve in curves)
    return f"{title}: {'; '.join(ends)}"
