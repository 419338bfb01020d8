"""Cancel a run or a sweep: `python launchers/cancel.py run=<name or directory>`, or `sweep=<name or directory>`.

Its job commits, comes down and is not queued again; submitting the run again resumes it.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    return run("slurm.submission.cancel_runs", usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())
