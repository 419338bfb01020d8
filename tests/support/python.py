"""Processes of Python that import from chosen folders."""

import os
import subprocess
import sys


def run_python(path: str, *arguments: object) -> str:
    """What `python -P ARGUMENT…` prints, with `path` as PYTHONPATH; it must end well within two minutes."""
    done = subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
