"""Print the table of all runs: `python launchers/runs.py [output=runs] [sweep=<name>] [--json]`."""

import sys
from pathlib import Path

MODULE = "slurm.monitor.runs_table"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("runs"))
