"""Write the report of a run: `python launchers/report.py run=<name or directory>`."""

import sys
from pathlib import Path

MODULE = "pipeline.observability.report_command"


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    return run("report")


if __name__ == "__main__":
    sys.exit(main())
