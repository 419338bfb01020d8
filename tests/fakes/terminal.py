"""What a terminal of some width would show."""

import io

from rich.console import Console

from slurm.monitor.run_snapshot import Snapshot
from slurm.monitor.status_panel import render_run


def shown(what: Snapshot, width: int = 110) -> str:
    """The panel of a snapshot, without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render_run(what))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
