"""The table of runs: on a terminal, in a pipe, as JSON, and live.

Owns how an `Overview` looks. Promises plain columns without control codes where there is no terminal, and that
ending it leaves all jobs alone.

    python launchers/runs.py [output=runs] [sweep=<name>] [--json]
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.errors import ConfigError, RollcallError
from pipeline.report.history import RUNS
from pipeline.report.words import number
from pipeline.waiting import CLOCK, Clock
from slurm import manifest
from slurm.commands import find_slurm
from slurm.overview import NEVER, Line, Overview

REFRESH_SECONDS = 2.0
COLUMNS = ("run", "job", "scheduler", "state", "step", "reward", "held-out", "attempts", "age")
_NUMBERS = COLUMNS[4:]
_AROUND = 8
"""Lines of a terminal that are kept for what stands around the table."""
_COLOURS = {"finished": "bold green", "failed": "bold red", "interrupted": "yellow", NEVER: "bright_black"}


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
        show(lines, overview.source, Console())
    return 0


def show(lines: Sequence[Line], source: str, console: Console) -> None:
    """The table once."""
    if console.is_terminal:
        console.print(render(lines, source))
        return
    for text in [*columns(lines), *failures(lines), _summary(lines, source)]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def follow(overview: Overview, console: Console | None = None, clock: Clock = CLOCK) -> list[Line]:
    """Show the table until no job of it is live any more, the last lines.

    Jobs end when they end: this waits as long, and whoever follows may leave at any time.
    """
    console = console or Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            return _until_over(
                overview,
                lambda lines: live.update(render(lines, overview.source, console.height - _AROUND), refresh=True),
                clock,
            )
    told: dict[str, str] = {}

    def tell(lines: Sequence[Line]) -> None:
        for line in lines:
            text = f"{line.path}: {line.state}" + (f": {line.failure}" if line.failure else "")
            if told.get(line.path) != text:
                told[line.path] = text
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    lines = _until_over(overview, tell, clock)
    show(lines, overview.source, console)
    return lines


def render(lines: Sequence[Line], source: str, most: int = 0) -> RenderableType:
    """The table for a terminal, of at most so many runs if `most` is given: those that are not over are preferred."""
    shown = fitting(lines, most) if most else lines
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bright_black")
    for column in COLUMNS:
        # a narrow terminal wraps the others first
        whole = column not in ("run", "scheduler")
        right = column in _NUMBERS
        table.add_column(column, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for sweep, members in groupby(shown, key=lambda line: line.sweep):
        if sweep:
            table.add_row(Text(sweep, "bold"))
        for line in members:
            name, job, scheduler, state, *numbers = cells(line)
            dot = Text(f"● {state}", _COLOURS.get(state, "green"))
            table.add_row(f"  {line.name}" if sweep else name, job, Text(scheduler, "bright_black"), dot, *numbers)
    parts: list[RenderableType] = [table, Text()]
    parts += [Text(text, "red") for text in failures(shown)]
    if len(shown) < len(lines):
        parts.append(Text(f"and {len(lines) - len(shown)} more, over", "bright_black"))
    return Group(*parts, Text(_summary(lines, source), "bright_black"))


def fitting(lines: Sequence[Line], most: int) -> list[Line]:
    """At most `most` lines, in their order; those of runs that are not over are preferred."""
    chosen = sorted(range(len(lines)), key=lambda place: (lines[place].live is False, place))[: max(1, most)]
    return [lines[place] for place in sorted(chosen)]


def columns(lines: Sequence[Line]) -> list[str]:
    """The table as aligned text, a header first."""
    rows = [COLUMNS, *(cells(line) for line in lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cells(line: Line) -> tuple[str, ...]:
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


def failures(lines: Sequence[Line]) -> list[str]:
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


def _step(line: Line) -> str:
    if line.step is None:
        return "—"
    text = f"{line.step}/{line.steps}" if line.steps else str(line.step)
    return text if line.stage == "rl" else f"{line.stage} {text}"


def _summary(lines: Sequence[Line], source: str) -> str:
    counts = {
        state: sum(line.state == state for line in lines) for state in dict.fromkeys(line.state for line in lines)
    }
    told = ", ".join(f"{amount} {state}" for state, amount in counts.items()) or "no runs"
    return f"{told} (from {source})"


def _until_over(overview: Overview, show: Callable[[Sequence[Line]], None], clock: Clock) -> list[Line]:
    while True:
        lines = overview.look()
        show(lines)
        if all(line.live is False for line in lines):
            return lines
        clock.sleep(REFRESH_SECONDS)


def _read(arguments: Sequence[str]) -> tuple[Path, str, bool]:
    """Output directory, sweep, and whether JSON is wanted."""
    given = {"output": str(RUNS), "sweep": ""}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in given and value:
            given[key] = value
        elif argument != "--json":
            raise ConfigError("arguments", argument, "output=<directory>, sweep=<name or directory>, or --json")
    output, sweep = Path(given["output"]), given["sweep"]
    if sweep:
        root = manifest.find(str(output / sweep) if (output / sweep).exists() else sweep).root
        output, sweep = root.parent, root.name
    if not output.is_dir():
        raise ConfigError("output", str(output), "a directory with runs", "submit one first, or name its output=…")
    return output, sweep, "--json" in arguments
