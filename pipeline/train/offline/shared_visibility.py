"""That all nodes see what a job starts from.

Owns the wait between a job that wrote its model on one node and the next, which reads that on all. A client of a shared
file system may remember for a while what lay there before: no such folder, or the model of the job before. Promises
that the ranks read the same files as rank 0 sees, or that the job says which rank does not.
"""

from pathlib import Path

from pipeline.errors import CheckpointError, DeadlineError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.utils import heartbeat
from pipeline.utils.waiting import wait_for

Files = dict[str, tuple[int, int]]
"""By name: size in bytes, and when it was changed (ns, by the server's clock)."""


def wait_until_visible(dispatch: RankGroup, folder: Path, seconds: float) -> None:
    """Wait until every rank sees the files of the folder as rank 0 does; `CheckpointError` after `seconds`."""
    seen = dispatch.run_on_all_models(sees_files, folder, files_in(folder), seconds)
    missing = [rank for rank, sees in enumerate(seen) if not sees]
    if missing:
        ranks = ", ".join(map(str, missing))
        hint = "it must lie on a file system that all nodes share; raise cluster.fs_visibility_seconds if it is slower"
        raise CheckpointError(f"rank {ranks} does not see {folder} as rank 0 does, after {seconds:g} s; {hint}")


def sees_files(_site: RankState, folder: Path, expected: Files, seconds: float) -> bool:
    """On every rank: whether the folder has these files by then."""
    try:
        with heartbeat.busy_with(f"looking for {folder.name}", seconds + 60):
            wait_for(str(folder), lambda: files_in(folder) == expected, seconds, longest_pause=5.0)
    except DeadlineError:
        return False
    return True


def files_in(folder: Path) -> Files:
    """The files right in a folder; none where there is none. Lists the one above too, which renews what a client
    remembers of it."""
    try:
        list(folder.parent.iterdir())
        found = {path.name: path.stat() for path in folder.iterdir() if path.is_file()}
    except OSError:  # gone between two looks, or not there yet
        return {}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}
