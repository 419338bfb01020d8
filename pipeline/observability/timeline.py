"""The timeline of one attempt: a chart with bars for each role's states, from start to stop.

At most `MAX_ROLES` roles are shown; failed roles have priority.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.observability.metric_charts import Chart
from pipeline.observability.number_format import clock
from pipeline.observability.run_history import Attempt
from pipeline.observability.svg_drawing import BAD, BUSY, GOOD, draw
from pipeline.roles.role_context import Status
from pipeline.run.fault_plan import FAULT
from pipeline.run.transitions import Transition

MAX_ROLES = 32
_NOTE = (
    "Pale: starting, restarting or stopping. Solid: ready; half as high: warming up. A cross: failed. A triangle: an "
    "injected fault."
)
_WIDTH, _ROW = 10.8, 0.27
_COLORS = {"starting": BUSY, "restarting": BUSY, "ready": GOOD, "stopping": BUSY}
Bar = tuple[float, float, str]
"""Start and length in seconds since the attempt began, and the state."""


def timeline(attempt: Attempt) -> Chart:
    """The chart of one attempt."""
    title, note = f"Attempt {attempt.name}", _NOTE
    if not attempt.transitions:
        return Chart(title, note, missing="no role of this attempt was started")
    began, ended = attempt.transitions[0].time, attempt.transitions[-1].time
    shown = shown_roles(attempt)

    def paint(axes: Axes) -> None:
        for row, role in enumerate(shown):
            own = [transition for transition in attempt.transitions if transition.role == role]
            _paint_role(axes, row, own, began, ended)
            for start, length in warm_ups(attempt.statuses.get(role), began):
                axes.barh(row, length, left=start, height=0.25, color=BUSY, linewidth=0)
        axes.set_yticks(range(len(shown)), shown)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, max(1.0, ended - began) * 1.01)
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 3, 6, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: clock(seconds)))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    hidden = len(attempt.states) - len(shown)
    note += f" {hidden} more roles are not shown." if hidden else ""
    restarts = [f"{role} ({len(reasons)})" for role, reasons in attempt.restarts.items()]
    note += f" Restarts in place: {', '.join(restarts)}." if restarts else ""
    return Chart(title, note, svg=draw(_WIDTH, 0.5 + _ROW * len(shown), paint, f"{title}: {len(shown)} roles"))


def shown_roles(attempt: Attempt) -> list[str]:
    """The roles to show, in the order of their first start."""
    first: dict[str, float] = {}
    for transition in attempt.transitions:
        first.setdefault(transition.role, transition.time)
    states = attempt.states
    chosen = sorted(first, key=lambda role: (states[role].state != "failed", first[role]))[:MAX_ROLES]
    return sorted(chosen, key=lambda role: first[role])


def bars(transitions: Sequence[Transition], began: float, ended: float) -> list[Bar]:
    """The bars of a role's states. A last state that is not an end lasts until `ended`."""
    ends = [transition.time for transition in transitions[1:]] + [ended]
    return [
        (transition.time - began, end - transition.time, transition.state)
        for transition, end in zip(transitions, ends, strict=True)
        if transition.state in _COLORS
    ]


def warm_ups(status: Status | None, began: float) -> list[tuple[float, float]]:
    """Start (since the start of the attempt) and length of a role's reported warm-up, in seconds; empty without one."""
    numbers = status.numbers if status else {}
    if not {"warm_up/began", "warm_up/ended"} <= numbers.keys():
        return []
    return [(numbers["warm_up/began"] - began, numbers["warm_up/ended"] - numbers["warm_up/began"])]


def _paint_role(axes: Axes, row: int, own: Sequence[Transition], began: float, ended: float) -> None:
    faults = [transition.time - began for transition in own if transition.state == FAULT]
    axes.plot(faults, [row] * len(faults), marker="v", color=BAD, markersize=6, linestyle="", clip_on=False)
    own = [transition for transition in own if transition.state != FAULT]
    for start, length, state in bars(own, began, ended):
        axes.barh(row, length, left=start, height=0.5, color=_COLORS[state], linewidth=0)
    failed = [transition.time - began for transition in own if transition.state == "failed"]
    axes.plot(failed, [row] * len(failed), marker="X", color=BAD, markersize=9, linestyle="", clip_on=False)
