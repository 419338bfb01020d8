"""Detection of out-of-memory kills, as an explanation of a role's exit.

Owns the reading of the kernel's count of out-of-memory kills: the count of this agent's control group if the kernel
counts per group, else the node's. Both may include processes of other users, as jobs may share a group. So the count
alone proves nothing: it explains a role's killed process only if it grew at about the same time.
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
"""Seconds from the kernel's decision to a role's exit: a process with much memory exits slowly, and torchrun stops the
other ranks before it reports."""
_KILLED = re.compile(rf"Signal {signal.SIGKILL.value} \(SIGKILL\) received by PID \d+")
"""The report of torchrun about a rank, and of our plugin about a process of vLLM (`pipeline.inference.vllm.plugin`)."""


@dataclass(frozen=True)
class OomCounter:
    """A file with a line `oom_kill <count>`, and a description of the counted processes."""

    file: Path
    whose: str

    def read(self) -> int | None:
        """The count; None if the kernel has no such count."""
        try:
            lines = self.file.read_text().splitlines()
        except OSError:
            return None
        counts = (int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill")
        return next(counts, None)


def find_counter() -> OomCounter | None:
    """The narrowest counter that includes this process; None if the kernel has no counter."""
    return next((counter for counter in _counters() if counter.read() is not None), None)


class OomWatch:
    """The counts of the last minute. Call `look` in each loop, and `explains` when a role has exited."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._counter, self._clock = find_counter(), clock
        self._seen: deque[tuple[float, int]] = deque()
        self._due = clock.now()
        self.look()

    def look(self) -> None:
        """Read the count, at most once a second."""
        if self._clock.now() >= self._due:
            self._read()

    def explains(self, code: int, last_lines: Sequence[str]) -> str:
        """An explanation of a role's exit with `code` if SIGKILL ended one of its processes, else an empty text.

        It notes whether the kernel counted out-of-memory kills within the window.
        """
        report = "" if code == -signal.SIGKILL else next((line for line in last_lines if _KILLED.search(line)), "")
        if code != -signal.SIGKILL and not report:
            return ""
        self._read()
        recent = self._seen[-1][1] - self._seen[0][1] if self._seen else 0
        whose = self._counter.whose if self._counter else ""
        who = ", after one of its processes was killed by SIGKILL" if report else ""
        return f"{who}, as the kernel ended {recent} of {whose} for lack of memory" if recent > 0 else who

    def _read(self) -> None:
        """Read the count, and drop counts older than the window, except for the last one before it."""
        now, count = self._clock.now(), self._counter.read() if self._counter else None
        self._due = now + LOOK_SECONDS
        if count is not None:
            self._seen.append((now, count))
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()


def _counters() -> Iterator[OomCounter]:
    """Possible counters, narrowest first: the groups of this process, their parents, then the node."""
    group, node = "the processes of its control group", "the processes of this node"
    for mount, path, name in _groups():
        for folder in (path, *path.parents):
            yield OomCounter(mount / folder.relative_to("/") / name, group)
    yield OomCounter(NODE, node)


def _groups() -> Iterator[tuple[Path, PurePosixPath, str]]:
    """The mount, this process's group and the counter's file name in each control-group hierarchy with memory."""
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
