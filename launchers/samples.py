"""Read the samples of a run: `python launchers/samples.py run=<name or directory> [--worst 5] [--tokens] [--json] …`.

`--help` lists the filters; docs/rollouts.md explains the output.
"""

import sys
from pathlib import Path

MODULE = "pipeline.observability.samples_command"
HAS_OPTIONS = True

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("samples"))
