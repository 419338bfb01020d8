"""Read the samples of a run: `python launchers/rollouts.py run=<name or directory> [--worst 5] [--tokens] [--json] …`.

`--help` lists the filters; docs/rollouts.md explains the output.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    return run("pipeline.observability.samples_command")


if __name__ == "__main__":
    sys.exit(main())
