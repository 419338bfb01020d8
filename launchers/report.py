"""Write the report of a run: `python launchers/report.py run=<name or directory>`."""

import sys
from pathlib import Path

MODULE = "pipeline.observability.report_command"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("report"))
