"""Small charts as SVG text, drawn with matplotlib.

An SVG needs no font, file or network. Its colors are CSS variables of the page, so that it follows light, dark and
print styles. Equal input gives equal text. Names in a chart are plain text: neither markup nor formulas.
"""

import io
import re
from collections.abc import Callable
from html import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.observability.report_style import LIGHT

INK, LINE, FILL = "#101011", "#101012", "#101013"
SERIES = ("#101021", "#101022", "#101023", "#101024", "#101025", "#101026")
GOOD, BUSY, BAD = "#101031", "#101032", "#101033"
_VARIABLES = {
    INK: "--quiet",
    LINE: "--line",
    FILL: "--faint",
    SERIES[0]: "--series-1",
    SERIES[1]: "--series-2",
    SERIES[2]: "--series-3",
    SERIES[3]: "--series-4",
    SERIES[4]: "--series-5",
    SERIES[5]: "--series-6",
    GOOD: "--good",
    BUSY: "--busy",
    BAD: "--bad",
}
"""The page's CSS variable for each color. The colors are placeholders, which are replaced in the SVG."""

_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rollcall",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.2,
}


def draw(width: float, height: float, paint: Callable[[Axes], None], label: str) -> str:
    """The SVG of one chart of at most `width` × `height` inches. `label` is its description for screen readers."""
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(text.getvalue(), label)


def standalone(svg: str) -> str:
    """A chart as a file, with the colors of a light page in place of variables, which few viewers of images know."""
    svg = svg.replace(">", '><rect width="100%" height="100%" fill="var(--page)"/>', 1).replace("--font", "sans-serif")
    for name, color in re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6});", LIGHT):
        svg = svg.replace(f"var({name})", color)
    return svg.replace("var(sans-serif)", "sans-serif")


def _themed(svg: str, label: str) -> str:
    """The `<svg>` element alone, without a fixed size, and with the page's CSS variables as colors."""
    svg = svg[svg.index("<svg") :]  # drop the XML prolog, which has no place in HTML
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    for mark, variable in _VARIABLES.items():
        svg = svg.replace(mark, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)
