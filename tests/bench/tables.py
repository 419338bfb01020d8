"""How a benchmark prints its figures: as a Markdown table, and one line that judges them."""

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose numbers are short; columns of numbers stand on the right."""
    cells = [[_short(cell) for cell in row] for row in rows]
    right = [all(isinstance(row[place], int | float) for row in rows) for place in range(len(columns))]
    rule = ["---:" if number else "---" for number in right]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *cells))


def judge(rule: str, met: bool) -> int:
    """Say whether the rule is met; the exit code."""
    print(f"\n{rule}: {'met' if met else 'NOT met'}")
    return 0 if met else 1


def _short(cell: object) -> str:
    if isinstance(cell, float) and abs(cell) < 1000:
        return f"{cell:.3g}"
    return f"{cell:,.0f}" if isinstance(cell, int | float) else str(cell)
