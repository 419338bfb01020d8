"""The table of runs: in a terminal, in a pipe, as JSON, and live.

Owns the rendering of an `Overview`. Promises plain columns without control codes if the output is not a terminal, and
that the end of a live table does not affect any job.

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
from slurm.scheduler.scheduler_registry import connect_scheduler

REFRESH_SECONDS = 2.0
COLUMNS = ("run", "job", "scheduler", "state", "step", "reward", "held-out", "attempts", "age")
_NUMBERS = COLUMNS[4:]
_AROUND = 4
"""Lines of a table in addition to its rows: header, empty line, number of hidden runs, and summary."""
_MAX_FAILURES = 3


class LineSource(Protocol):
    """The source of a live table's lines: an `Overview`, or a wrapper of it."""

    @property
    def source(self) -> str: ...

    def look(self) -> list[RunSummary]: ...


@dataclass(frozen=True)
class _TableSpec:
    """The layout of a table for one range of widths.

    Attributes:
        columns: the columns after the name.
        gap: spaces between columns.
        reasons: whether the scheduler's state includes the reason of a pending job.
        least_name: characters of the longest name for which the table must have room.
    """

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
"""The layouts, widest first."""


@dataclass(frozen=True)
class _Row:
    """A row of the table, as texts."""

    line: RunSummary

    @property
    def name(self) -> str:
        return f"  {self.line.name}" if self.line.sweep else self.line.name

    def cell(self, column: str, spec: _TableSpec) -> str:
        text = dict(zip(COLUMNS, cells_of(self.line), strict=True))[column]
        if column == "state":
            return f"● {text}"
        return text if spec.reasons or column != "scheduler" else text.partition(" ")[0]

    def style(self, column: str) -> str:
        if column == "state":
            return COLORS.get(self.line.state, UNSURE)
        return "bright_black" if column == "scheduler" else ""


def main(arguments: Sequence[str]) -> int:
    """Print the table once. Returns 0, or 2 for a wrong argument."""
    try:
        output, sweep, as_json = _read(arguments)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    overview = Overview(output, sweep, connect_scheduler)
    lines = overview.look()
    if as_json:
        document = {"output": str(output), "source": overview.source, "runs": [asdict(line) for line in lines]}
        print(json.dumps(document, indent=2))
    else:
        print_table(lines, overview.source, terminal.console())
    return 0


def print_table(lines: Sequence[RunSummary], source: str, console: Console) -> None:
    """Print the table once."""
    if console.is_terminal:
        console.print(render_table(lines, source, console.width))
        return
    for text in [*aligned_lines(lines), *failure_lines(lines), _summary(lines, source)]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def watch_sweep(arguments: Sequence[str], clock: Clock = CLOCK) -> int:
    """Show the sweep of `sweep=<name or directory>` live. Returns 0 if all its runs finished or after Ctrl-C, else 1.

    Between two points no run is live, so the table also waits while a launcher holds the sweep's lock.
    """
    try:
        output, sweep, _ = _read(arguments)
        lock, overview = SweepPaths(output / sweep).lock, Overview(output, sweep, connect_scheduler)
        lines = follow_table(
            overview, clock=clock, until=lambda lines: all_over(lines) and not file_locks.is_held(lock)
        )
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; the jobs continue")
        return 0
    return 0 if all(line.state == "finished" for line in lines) else 1


def all_over(lines: Sequence[RunSummary]) -> bool:
    """Whether no job of these runs is live."""
    return all(line.live is False for line in lines)


def follow_table(
    overview: LineSource,
    console: Console | None = None,
    clock: Clock = CLOCK,
    until: Callable[[Sequence[RunSummary]], bool] = all_over,
) -> list[RunSummary]:
    """Show the table until `until(lines)`, by default until no job is live. Returns the last lines.

    There is no deadline; the user may end the display at any time. In a terminal the table fits the screen until the
    end, when the whole table is printed.
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
    printed: dict[str, str] = {}

    def print_changes(lines: Sequence[RunSummary], _: bool) -> None:
        for line in lines:
            text = f"{line.path}: {line.state}" + (f": {line.failure}" if line.failure else "")
            if printed.get(line.path) != text:
                printed[line.path] = text
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    lines = show_until_last(look, print_changes, REFRESH_SECONDS, clock)
    print_table(lines, overview.source, console)
    return lines


def render_table(lines: Sequence[RunSummary], source: str, width: int, height: int = 0) -> RenderableType:
    """The table for a terminal of `width` columns. With `height`, it has at most that many lines, and none wraps.

    Lines that do not fit are hidden: first finished runs, then failed ones, and all failures but a few.
    """
    failures = failure_lines(lines)
    more = len(failures) - _MAX_FAILURES if height else 0
    if more > 0:
        failures = [*failures[:_MAX_FAILURES], f"and {more} more"]
    shown = lines_that_fit(lines, height - len(failures) - _AROUND) if height else lines
    notes = [Text(text, "red", no_wrap=height > 0, overflow="ellipsis") for text in failures]
    if len(shown) < len(lines):
        notes.append(Text(f"and {len(lines) - len(shown)} more runs", "bright_black"))
    notes.append(Text(_summary(lines, source), "bright_black", no_wrap=height > 0, overflow="ellipsis"))
    return Group(_table(shown, width), Text(), *notes)


def _table(lines: Sequence[RunSummary], width: int) -> Table:
    """The table with the widest layout that fits. If none has room for the names, these are shortened."""
    rows = [_Row(line) for line in lines]
    names = max((len(row.name) for row in rows), default=0)
    for spec in _TABLE_SPECS:
        left = width - sum(
            spec.gap + max(len(column), *(len(row.cell(column, spec)) for row in rows), 0) for column in spec.columns
        )
        if left >= min(names, spec.least_name):
            break
    table = Table(box=None, padding=(0, spec.gap, 0, 0), pad_edge=False, header_style="bright_black")
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=max(left, 4))
    for column in spec.columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for sweep, members in groupby(rows, key=lambda row: row.line.sweep):
        if sweep:
            table.add_row(Text(sweep, "bold"))
        for row in members:
            table.add_row(row.name, *(Text(row.cell(column, spec), row.style(column)) for column in spec.columns))
    return table


def lines_that_fit(lines: Sequence[RunSummary], most: int) -> list[RunSummary]:
    """At most `most` rows, including headings. Live runs take precedence, then failed ones."""
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
    """The table as aligned text, with a header."""
    rows = [COLUMNS, *(cells_of(line) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cells_of(line: RunSummary) -> tuple[str, ...]:
    """One text for each of `COLUMNS`."""
    return (
        line.path,
        line.job or "—",
        line.scheduler or "—",
        line.state + (f" +{line.attached}" if line.attached else ""),
        _step(line),
        number(line.reward, ".3f"),
        number(line.accuracy, ".3f"),
        str(line.attempts),
        age(line.age),
    )


def failure_lines(lines: Sequence[RunSummary]) -> list[str]:
    """Why runs failed or were refused, one line each."""
    return [f"{line.path}: {line.failure}" for line in lines if line.failure]


def age(seconds: float | None) -> str:
    """An age such as `12 s`, `5 min`, `3 h` or `4 d`; a dash for None."""
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
    states = ", ".join(f"{amount} {state}" for state, amount in counts.items()) or "no runs"
    return f"{states} (from {source})"


def _read(arguments: Sequence[str]) -> tuple[Path, str, bool]:
    """The output directory, the sweep, and whether to print JSON; `ConfigError` for another argument."""
    settings = {"output": "", "sweep": ""}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in settings and value:
            settings[key] = value
        elif argument != "--json":
            raise ConfigError("arguments", argument, "output=<directory>, sweep=<name or directory>, or --json")
    output, sweep = Path(settings["output"] or RUNS), settings["sweep"]
    if not output.is_dir() and (settings["output"] or not sweep):
        raise ConfigError("output", str(output), "a directory with runs", "submit one first, or name its output=…")
    if sweep:
        root = sweep_manifest.find_sweep(sweep, output if settings["output"] else None).root
        output, sweep = root.parent, root.name
    return output, sweep, "--json" in arguments
