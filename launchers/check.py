"""Prove that a run trained each position once, in order and in time: `python launchers/check.py run=<name>`.

Reads only the run directory, also of a run in progress. Exit code 1 and one line per problem if there are any.
"""

import sys
from pathlib import Path

MODULE = "pipeline.observability.check_command"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("check"))
