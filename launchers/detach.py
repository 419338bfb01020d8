"""Remove attached servers from a run: `python launchers/detach.py run=<name or directory> [job=<number>]`.

Without a number, all attached jobs end. Requests that run on their servers are continued on others.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.detach_servers"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("detach"))
