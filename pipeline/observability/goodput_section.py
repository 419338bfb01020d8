"""The goodput of a run for people: lines of text, a section of the report, and a chart.

The chart has one bar for each outage, divided by cause, over the same axis of seconds. Pure.
"""

from collections.abc import Sequence
from html import escape

from matplotlib.axes import Axes

from pipeline.observability.metric_charts import Chart
from pipeline.observability.number_format import clock
from pipeline.observability.svg_drawing import BAD, BUSY, FILL, GOOD, INK, LINE, SERIES, draw, standalone
from pipeline.run.lost_seconds import CAUSES, Goodput, Outage
from pipeline.run.metrics_log import MetricRecord

Rows = Sequence[MetricRecord]
MAX_OUTAGES = 24
"""Bars of the chart, of the newest outages."""
HEADS = ("outage", "seconds to the next step", *CAUSES)
_COLORS = dict(zip(CAUSES, (BAD, INK, BUSY, SERIES[0], LINE, *SERIES[2:], GOOD, SERIES[1], FILL), strict=True))
_WIDTH, _ROW = 10.8, 0.3


def summary(measured: Goodput) -> str:
    """The goodput in one line, with the causes of the lost time, the largest first."""
    lost = sorted(measured.seconds.items(), key=lambda item: -item[1])
    causes = ", ".join(f"{cause} {seconds:.0f} s" for cause, seconds in lost if seconds >= 0.5)
    ratio = f"{measured.ratio:.0%} of {clock(measured.wall)} trained steps of the final model"
    return f"{ratio}; lost: {causes}" if causes else ratio


def outage_rows(measured: Goodput) -> list[tuple[str, ...]]:
    """One row per outage, the start first, with the columns of `HEADS`."""
    return [_row(outage) for outage in (measured.start, *measured.outages)]


def outages_chart(measured: Goodput) -> Chart:
    """The lost seconds of each outage by cause."""
    shown = [measured.start, *measured.outages][-MAX_OUTAGES:]
    title, note = "Lost seconds of each outage", "From the start, a fault or a stop request to the next step."

    def paint(axes: Axes) -> None:
        for cause, color in _COLORS.items():
            widths = [outage.seconds.get(cause, 0.0) for outage in shown]
            lefts = [_before(outage, cause) for outage in shown]
            if any(widths):
                axes.barh(range(len(shown)), widths, left=lefts, height=0.6, color=color, linewidth=0, label=cause)
        axes.set_yticks(range(len(shown)), [_short(outage.what) for outage in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6)

    label = f"{title}: {len(shown)} outages"
    return Chart(title, note, svg=draw(_WIDTH, 1.3 + _ROW * len(shown), paint, label))


def steps_picture(undisturbed: Rows, disturbed: Rows, outages: Sequence[float]) -> str:
    """RL steps over minutes of both runs, from the first step of each; a triangle for each outage, at its time."""

    def paint(axes: Axes) -> None:
        for rows, name, color in ((undisturbed, "undisturbed", INK), (disturbed, "disturbed", SERIES[0])):
            minutes, steps = [_minutes(row["time"], rows) for row in rows], [row["step"] for row in rows]
            axes.plot(minutes, steps, color=color, label=name)
        struck = [time for time in outages if time > disturbed[0]["time"]]
        reached = [max(row["step"] for row in disturbed if row["time"] <= time) for time in struck]
        axes.plot([_minutes(time, disturbed) for time in struck], reached, "v", color=BAD, label="fault", clip_on=False)
        axes.set_xlabel("minutes since the first step")
        axes.set_ylabel("RL steps of the final model")
        axes.set_ylim(0, None)
        axes.legend()

    return standalone(draw(_WIDTH, 3.2, paint, "RL steps of an undisturbed and a disturbed run"))


def _minutes(time: float, rows: Rows) -> float:
    return float(time - rows[0]["time"]) / 60


def goodput_table(measured: Goodput) -> str:
    """The outages as an HTML table, without causes that no outage has."""
    rows = outage_rows(measured)
    used = [column for column in range(len(HEADS)) if column < 2 or any(row[column] != "" for row in rows)]
    head = "".join(f"<th>{HEADS[column]}</th>" for column in used)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(row[column])}</td>' for column in used)}</tr>" for row in rows)
    return f'<table class="outages"><tr>{head}</tr>{lines}</table>'


def _row(outage: Outage) -> tuple[str, ...]:
    gap = f"{outage.gap:.1f}" if outage.gap is not None else "—"
    causes = (outage.seconds.get(cause, 0.0) for cause in CAUSES)
    return (outage.what, gap, *(f"{seconds:.1f}" if seconds else "" for seconds in causes))


def _before(outage: Outage, cause: str) -> float:
    """The seconds of the causes that are drawn before this one."""
    return sum(outage.seconds.get(earlier, 0.0) for earlier in CAUSES[: CAUSES.index(cause)])


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
