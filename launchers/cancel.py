"""Cancel a run or a sweep: `python launchers/cancel.py run=<name or directory>`, or `sweep=<name or directory>`.

The job saves a checkpoint, shuts down and is not queued again. The command that submitted the run resumes it.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.cancel_runs"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("cancel"))
