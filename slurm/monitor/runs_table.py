"""The table of runs: on a terminal, in a pipe, as JSON, and live.

Owns how an `Overview` looks. Promises plain columns without control codes where there is no terminal, and that
ending it leaves all jobs alone.

    python launchers/runs.py [output=runs] [sweep=<name>] [--json]
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.number_format import number
from pipeline.observability.run_history import RUNS
from pipeline.run.paths import SweepPaths
from pipeline.utils import terminal
from pipeline.utils.waiting import CLOCK, Clock
from slurm.monitor.refresh_loop import show_until_last
from slurm.monitor.runs_overview import Overview, RunSummary
from slurm.monitor.status_panel import COLORS, UNSURE
from slurm.registry import file_locks, sweep_manifest
from slurm.scheduler.slurm.slurm_commands import find_slurm

REFRESH_SECONDS = 2.0
COLUMNS = ("run", "job", "scheduler", "state", "step", "reward", "held-out", "attempts", "age")
_NUMBERS = COLUMNS[4:]
_AROUND = 4
"""Lines around the rows of a table: its header, an empty one, how many more there are, and the summary."""
_MAX_FAILURES = 3


class LineSource(Protocol):
    """What a table is followed from: an `Overview`, or one that something is done beside at each look."""

    @property
    def source(self) -> str: ...

    def look(self) -> list[RunSummary]: ...


@dataclass(frozen=True)
class _TableSpec:
    """How wide a table is: its columns after the name, spaces between them, whether a waiting job says why, and how
    much of the longest name there must be room for."""

    columns: tuple[str, ...]
    gap: int = 2
    reasons: bool = True
    least_name: int = 63


_TABLE_SPECS = (
    _TableSpec(COLUMNS[1:]),
    _TableSpec(COLUMNS[1:], reasons=False),
    _TableSpec(COLUMNS[1:], gap=1, reasons=False, least_name=24),
    _TableSpec(tuple(column for column in COLUMNS[1:] if column not in ("scheduler", "attempts")), gap=1, least_name=0),
)
"""The widest first."""


@dataclass(frozen=True)
class _Row:
    """A line of the table as texts."""

    line: RunSummary

    @property
    def name(self) -> str:
        return f"  {self.line.name}" if self.line.sweep else self.line.name

    def cell(self, column: str, form: _TableSpec) -> str:
        text = dict(zip(COLUMNS, cells_of(self.line), strict=True))[column]
        if column == "state":
            return f"● {text}"
        return text if form.reasons or column != "scheduler" else text.partition(" ")[0]

    def style(self, column: str) -> str:
        if column == "state":
            return COLORS.get(self.line.state, UNSURE)
        return "bright_black" if column == "scheduler" else ""


def main(arguments: Sequence[str]) -> int:
    """Print the table once; 0, or 2 for a wrong argument."""
    try:
        output, sweep, as_json = _read(arguments)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    overview = Overview(output, sweep, find_slurm)
    lines = overview.look()
    if as_json:
        document = {"output": str(output), "source": overview.source, "runs": [asdict(line) for line in lines]}
        print(json.dumps(document, indent=2))
    else:
        print_table(lines, overview.source, terminal.console())
    return 0


def print_table(lines: Sequence[RunSummary], source: str, console: Console) -> None:
    """The table once."""
    if console.is_terminal:
        console.print(render_table(lines, source, console.width))
        return
    for text in [*aligned_lines(lines), *failure_lines(lines), _summary(lines, source)]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def watch_sweep(arguments: Sequence[str], clock: Clock = CLOCK) -> int:
    """`sweep=<name or directory>`: follow a sweep; 0 when all its runs finished, or it was left, else 1.

    Between two points none is live: as long as a launcher is at the sweep, it may start further ones.
    """
    try:
        output, sweep, _ = _read(arguments)
        lock, overview = SweepPaths(output / sweep).lock, Overview(output, sweep, find_slurm)
        lines = follow_table(
            overview, clock=clock, until=lambda lines: all_over(lines) and not file_locks.is_held(lock)
        )
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; the jobs go on")
        return 0
    return 0 if all(line.state == "finished" for line in lines) else 1


def all_over(lines: Sequence[RunSummary]) -> bool:
    """Whether no job of these runs is live any more."""
    return all(line.live is False for line in lines)


def follow_table(
    overview: LineSource,
    console: Console | None = None,
    clock: Clock = CLOCK,
    until: Callable[[Sequence[RunSummary]], bool] = all_over,
) -> list[RunSummary]:
    """Show the table `until(lines)`, by default until no job of it is live any more; the last lines.

    Jobs end when they end: this waits as long, and whoever follows may leave at any time. On a terminal the table keeps
    to its size until the end, when all of it is shown.
    """
    console = console or terminal.console()

    def look() -> tuple[list[RunSummary], bool]:
        lines = overview.look()
        return lines, until(lines)

    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:

            def fit(lines: Sequence[RunSummary], _: bool) -> None:
                live.update(render_table(lines, overview.source, console.width, console.height - 1), refresh=True)

            lines = show_until_last(look, fit, REFRESH_SECONDS, clock)
            live.update(render_table(lines, overview.source, console.width))
            return lines
    told: dict[str, str] = {}

    def tell(lines: Sequence[RunSummary], _: bool) -> None:
        for line in lines:
            text = f"{line.path}: {line.state}" + (f": {line.failure}" if line.failure else "")
            if told.get(line.path) != text:
                told[line.path] = text
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    lines = show_until_last(look, tell, REFRESH_SECONDS, clock)
    print_table(lines, overview.source, console)
    return lines


def render_table(lines: Sequence[RunSummary], source: str, width: int, height: int = 0) -> RenderableType:
    """The table for a terminal of so many columns; with `height` of at most so many lines, of which none wraps.

    What does not fit is left out: runs that finished first, then those that failed; failures beyond a few.
    """
    told = failure_lines(lines)
    more = len(told) - _MAX_FAILURES if height else 0
    if more > 0:
        told = [*told[:_MAX_FAILURES], f"and {more} more"]
    shown = lines_that_fit(lines, height - len(told) - _AROUND) if height else lines
    notes = [Text(text, "red", no_wrap=height > 0, overflow="ellipsis") for text in told]
    if len(shown) < len(lines):
        notes.append(Text(f"and {len(lines) - len(shown)} more runs", "bright_black"))
    notes.append(Text(_summary(lines, source), "bright_black", no_wrap=height > 0, overflow="ellipsis"))
    return Group(_table(shown, width), Text(), *notes)


def _table(lines: Sequence[RunSummary], width: int) -> Table:
    """As many columns as fit; where even the fewest leave too little for the names, these are shortened."""
    rows = [_Row(line) for line in lines]
    names = max((len(row.name) for row in rows), default=0)
    for form in _TABLE_SPECS:
        left = width - sum(
            form.gap + max(len(column), *(len(row.cell(column, form)) for row in rows), 0) for column in form.columns
        )
        if left >= min(names, form.least_name):
            break
    table = Table(box=None, padding=(0, form.gap, 0, 0), pad_edge=False, header_style="bright_black")
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=max(left, 4))
    for column in form.columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for sweep, members in groupby(rows, key=lambda row: row.line.sweep):
        if sweep:
            table.add_row(Text(sweep, "bold"))
        for row in members:
            table.add_row(row.name, *(Text(row.cell(column, form), row.style(column)) for column in form.columns))
    return table


def lines_that_fit(lines: Sequence[RunSummary], most: int) -> list[RunSummary]:
    """At most `most` rows, headings counted. If these are fewer: what is not over comes first, then what failed."""
    if len(lines) + len({line.sweep for line in lines} - {""}) <= most:
        return list(lines)
    urgent = sorted(lines, key=lambda line: (line.live is False, line.state == "finished"))
    shown = list(urgent[: max(1, most)])
    while len(shown) > 1 and len(shown) + len(_headings(shown)) > most:
        shown.pop()
    return shown


def _headings(lines: Sequence[RunSummary]) -> list[str]:
    return [sweep for sweep, _ in groupby(lines, key=lambda line: line.sweep) if sweep]


def aligned_lines(lines: Sequence[RunSummary]) -> list[str]:
    """The table as aligned text, a header first."""
    rows = [COLUMNS, *(cells_of(line) for line in lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cells_of(line: RunSummary) -> tuple[str, ...]:
    """One text for each of `COLUMNS`."""
    return (
        line.path,
        line.job or "—",
        line.scheduler or "—",
        line.state,
        _step(line),
        number(line.reward, ".3f"),
        number(line.accuracy, ".3f"),
        str(line.attempts),
        age(line.age),
    )


def failure_lines(lines: Sequence[RunSummary]) -> list[str]:
    """Why runs failed or were refused, a line each."""
    return [f"{line.path}: {line.failure}" for line in lines if line.failure]


def age(seconds: float | None) -> str:
    """`12 s`, `5 min`, `3 h` or `4 d`; a dash for None."""
    if seconds is None:
        return "—"
    for most, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{max(0, seconds) / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def _step(line: RunSummary) -> str:
    if line.step is None:
        return "—"
    text = f"{line.step}/{line.steps}" if line.steps else str(line.step)
    return text if line.stage == "rl" else f"{line.stage} {text}"


def _summary(lines: Sequence[RunSummary], source: str) -> str:
    counts = {
        state: sum(line.state == state for line in lines) for state in dict.fromkeys(line.state for line in lines)
    }
    told = ", ".join(f"{amount} {state}" for state, amount in counts.items()) or "no runs"
    return f"{told} (from {source})"


def _read(arguments: Sequence[str]) -> tuple[Path, str, bool]:
    """Output directory, sweep, and whether JSON is wanted."""
    given = {"output": "", "sweep": ""}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in given and value:
            given[key] = value
        elif argument != "--json":
            raise ConfigError("arguments", argument, "output=<directory>, sweep=<name or directory>, or --json")
    output, sweep = Path(given["output"] or RUNS), given["sweep"]
    if not output.is_dir() and (given["output"] or not sweep):
        raise ConfigError("output", str(output), "a directory with runs", "submit one first, or name its output=…")
    if sweep:
        root = sweep_manifest.find_sweep(sweep, output if given["output"] else None).root
        output, sweep = root.parent, root.name
    return output, sweep, "--json" in arguments
