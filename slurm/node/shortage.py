"""Whether the kernel ended processes of this node for lack of memory.

It counts those of the whole machine, also where a job was over its own limit; a stranger's on a shared node count too.
"""

from pathlib import Path

COUNTERS = Path("/proc/vmstat")


def ended_for_memory() -> int:
    """Processes that the kernel has ended since the machine was started; 0 where it does not count them."""
    try:
        lines = COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(count) for name, count in map(str.split, lines) if name == "oom_kill"), 0)
