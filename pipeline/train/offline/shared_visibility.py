"""The wait until all nodes see the files that a job starts from.

A job writes its model on one node, and the next job reads it on all nodes. A client of a shared file system may cache
an older state for a while: no folder, or the model of an earlier job. Promises that all ranks read the files that rank
0 sees, or that the error names the ranks that do not see them.
"""

from pathlib import Path

from pipeline.errors import CheckpointError, DeadlineError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.utils import heartbeat
from pipeline.utils.waiting import wait_for

Files = dict[str, tuple[int, int]]
"""Name → (size in bytes, time of the last change in ns by the server's clock)."""


def wait_until_visible(dispatch: RankGroup, folder: Path, seconds: float) -> None:
    """Wait until every rank sees the files of the folder as rank 0 does; `CheckpointError` after `seconds`."""
    visible = dispatch.run_on_all_models(sees_files, folder, files_in(folder), seconds)
    missing = [rank for rank, is_visible in enumerate(visible) if not is_visible]
    if missing:
        ranks = ", ".join(map(str, missing))
        hint = "it must lie on a file system that all nodes share; raise cluster.fs_visibility_seconds if it is slower"
        raise CheckpointError(f"rank {ranks} does not see {folder} as rank 0 does, after {seconds:g} s; {hint}")


def sees_files(_site: RankState, folder: Path, expected: Files, seconds: float) -> bool:
    """Whether the folder has these files on this rank within `seconds`; runs on every rank."""
    try:
        with heartbeat.busy_with(f"looking for {folder.name}", seconds + 60):
            wait_for(str(folder), lambda: files_in(folder) == expected, seconds, longest_pause=5.0)
    except DeadlineError:
        return False
    return True


def files_in(folder: Path) -> Files:
    """The files directly in a folder; empty if it does not exist."""
    try:
        list(folder.parent.iterdir())  # listing the parent makes an NFS client revalidate its cached entry
        files = {path.name: path.stat() for path in folder.iterdir() if path.is_file()}
    except OSError:  # removed between the two calls, or not there yet
        return {}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in files.items()}
