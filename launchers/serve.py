"""Serve the Tinker API: `python launchers/serve.py experiment=tinker cluster=local [key=value …]`.

The public `tinker` SDK is the client; see docs/tinker.md. `--url` prints how a client reaches a run that serves,
`--usage` what each key's name used.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    return run("slurm.submission.serve_tinker", usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())
