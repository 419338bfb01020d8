"""What another user of the same machine can do.

Only root can start a process of another user; tests that need one are skipped elsewhere.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest

NOBODY = 65534

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of two users")


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory that everybody may write to, as /tmp; pytest's own are closed to other users."""
    folder = Path(mkdtemp(prefix="rollcall-test-"))
    try:
        folder.chmod(0o1777)
        yield folder
    finally:
        shutil.rmtree(folder)


def as_stranger(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run Python `code` with the standard library alone, as a user with no rights."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
