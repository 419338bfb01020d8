"""Submit one run: `python launchers/submit.py experiment=demo cluster=local`."""

import sys
from pathlib import Path

MODULE = "slurm.submission.submit_run"
HAS_OPTIONS = True

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("submit"))
