"""Whether processes are still there; one that has ended and waits for its parent is not."""

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether this very process has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    """Whether no process has this id."""
    try:
        return not runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
