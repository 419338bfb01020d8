"""What a terminal of some width would show."""

import io

from rich.console import Console

from slurm.watch.display import render_run
from slurm.watch.snapshot import Snapshot


def shown(what: Snapshot, width: int = 110) -> str:
    """The panel of a snapshot, without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render_run(what))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
