"""Remove attached servers from a run: `python launchers/detach.py run=<name or directory> [job=<number>]`.

Without a number, all attached jobs end. Requests that run on their servers are continued on others.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    return run("slurm.submission.detach_servers", usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())
