"""Repair of data that Redis would refuse to load.

Owns the check of an attempt's append-only data before its Redis runs, and the repair. The Redis may be older than the
one that wrote the data. Promises that the Redis which starts afterwards has a prefix of its history: all of it, the
part before the damage, or nothing. Each suffices, because the missing positions are not done in the ledger and are
issued again. Needs only the server's binary, which acts as its own checker when it is called by that name.
"""

import subprocess
from itertools import count
from pathlib import Path

from pipeline.errors import StreamError
from pipeline.transport.redis_persistence import ONE_FILE, SEVERAL_FILES, data_bytes, needs_redis_7


def make_loadable(server: Path, folder: Path, seconds: float, version: int) -> str:
    """Check the data in `folder`, and repair it or move it aside; returns a sentence on the repair, or nothing.

    `version` is the server's. `StreamError` when the check takes longer than `seconds`.
    """
    if version < 7 and needs_redis_7(folder):
        aside = _set_aside(folder, "newer")
        return (
            f"{server} is older than Redis 7, which wrote the data in {folder}; it starts empty, the data is in {aside}"
        )
    data = _checked_file(folder)
    if data is None or _passes(server, data, seconds):
        return ""
    before = data_bytes(folder)
    if _passes(server, data, seconds, "--fix") and _passes(server, data, seconds):
        left = f"{data_bytes(folder)} of {before} bytes are left"
        return f"the data in {folder} was damaged or torn, and is cut off there: {left}"
    aside = _set_aside(folder, "damaged")
    return f"the data in {folder} is damaged beyond repair; Redis starts empty, the data is in {aside}"


def _checked_file(folder: Path) -> Path | None:
    """The path that the checker takes; None without data."""
    candidates = (folder / SEVERAL_FILES / f"{ONE_FILE}.manifest", folder / ONE_FILE)
    return next((path for path in candidates if path.exists()), None)


def _passes(server: Path, data: Path, seconds: float, *options: str) -> bool:
    name = server.name.replace("-server", "-check-aof")
    try:
        checked = subprocess.run(
            [name, *options, str(data)], executable=server, input=b"y\n", capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise StreamError(f"{name} took more than {seconds:.0f} s for {data}; raise cluster.startup_seconds") from None
    return checked.returncode == 0


def _set_aside(folder: Path, why: str) -> Path:
    """Move the data to a new folder named after the reason; returns the folder."""
    aside = next(path for number in count(1) if not (path := folder / f"{why}-{number}").exists())
    aside.mkdir(mode=0o700)
    for name in (ONE_FILE, SEVERAL_FILES):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside
