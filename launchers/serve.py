"""Serve the Tinker API: `python launchers/serve.py experiment=tinker cluster=local [key=value …]`.

The public `tinker` SDK is the client; see docs/tinker.md. `--url` prints the address of a serving run and its
client's environment variables, `--usage` the usage of each key's name.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.serve_tinker"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("serve"))
