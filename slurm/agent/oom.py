"""Whether the kernel ended processes for lack of memory, as far as that explains the end of a role.

Owns the kernel's count of the processes that it ended so: that of this agent's control group, where the kernel counts
by group, else that of the node. Either may count processes of others, as jobs may share a group. So the count alone
proves nothing: it explains a process of ours that was killed, at about the time at which it grew.
"""

import re
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.utils.waiting import CLOCK, Clock

NODE = Path("/proc/vmstat")
GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
LOOK_SECONDS = 1.0
WINDOW_SECONDS = 60.0
"""From the kernel's decision to the end of a role: a process with much memory takes long to end, and torchrun asks the
other ranks to end before it tells."""
_KILLED = re.compile(rf"Signal {signal.SIGKILL.value} \(SIGKILL\) received by PID \d+")
"""What torchrun says of a rank, and our plugin of a process of vLLM's (`pipeline.inference.vllm.plugin`)."""


@dataclass(frozen=True)
class OomCounter:
    """A file with a line `oom_kill <count>`, and whose processes it counts."""

    file: Path
    whose: str

    def read(self) -> int | None:
        """The count; None where the kernel has none."""
        try:
            lines = self.file.read_text().splitlines()
        except OSError:
            return None
        counts = (int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill")
        return next(counts, None)


def find_counter() -> OomCounter | None:
    """The narrowest counter that counts this process; None where the kernel has none."""
    return next((counter for counter in _counters() if counter.read() is not None), None)


class OomWatch:
    """The count over the last minute. `look` as often as there is time, then `explains` when a role has ended."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._counter, self._clock = find_counter(), clock
        self._seen: deque[tuple[float, int]] = deque()
        self._due = clock.now()
        self.look()

    def look(self) -> None:
        """Read the count, if that was not done within the last second."""
        if self._clock.now() >= self._due:
            self._read()

    def explains(self, code: int, last_lines: Sequence[str]) -> str:
        """Words about a role that ended with `code`, if a process of it was killed: who, and whether the kernel ended
        processes for lack of memory at that time. Empty if none was killed."""
        told = "" if code == -signal.SIGKILL else next((line for line in last_lines if _KILLED.search(line)), "")
        if code != -signal.SIGKILL and not told:
            return ""
        self._read()
        recent = self._seen[-1][1] - self._seen[0][1] if self._seen else 0
        whose = self._counter.whose if self._counter else ""
        who = ", after one of its processes was killed by SIGKILL" if told else ""
        return f"{who}, as the kernel ended {recent} of {whose} for lack of memory" if recent > 0 else who

    def _read(self) -> None:
        """Keep the counts of the window, and the last one before it."""
        now, count = self._clock.now(), self._counter.read() if self._counter else None
        self._due = now + LOOK_SECONDS
        if count is not None:
            self._seen.append((now, count))
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()


def _counters() -> Iterator[OomCounter]:
    """From the narrowest to the widest: the groups of this process and those above them, then the node."""
    group, node = "the processes of its control group", "the processes of this node"
    for mount, path, name in _groups():
        for folder in (path, *path.parents):
            yield OomCounter(mount / folder.relative_to("/") / name, group)
    yield OomCounter(NODE, node)


def _groups() -> Iterator[tuple[Path, PurePosixPath, str]]:
    """Where the kernel may count: the mount of each hierarchy, this process's group in it, and the file there."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield MOUNT, PurePosixPath(path), "memory.events"
        elif "memory" in controllers.split(","):
            yield MOUNT / "memory", PurePosixPath(path), "memory.oom_control"
