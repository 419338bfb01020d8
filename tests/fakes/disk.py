"""A shared filesystem in memory, with the faults of real ones.

`Disk` is the server, `View` what one rank sees through its mount: files appear late, are unreadable at first, and the
rank may die or stall before any of its operations. Everything follows from the seed; time is the caller's clock.
"""

import errno
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pipeline.utils.waiting import Clock


class Crashed(BaseException):
    """The process of a rank is gone; nothing of the program may catch it."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong.

    Attributes:
        late: most seconds until another rank sees a file, drawn for each file and reader.
        lags: rank → seconds after which it sees whatever another wrote, in place of what would be drawn.
        torn: most failed reads of a file once it is listed, drawn likewise.
        deaths: rank → number of the operation before which it dies.
        stalls: rank → number of the operation before which it stalls, and for how many seconds.
        outages: rank → from when until when every operation of it fails.
        seed: of the draws.
    """

    late: float = 0.0
    lags: Mapping[int, float] = field(default_factory=dict)
    torn: int = 0
    deaths: Mapping[int, int] = field(default_factory=dict)
    stalls: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    outages: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0


@dataclass
class Version:
    """One content of a file: who wrote it and when."""

    time: float
    writer: int
    document: Any


class Disk:
    """The server: every version of every file, and who created what."""

    def __init__(self, clock: Clock, faults: Faults) -> None:
        self.clock, self.faults = clock, faults
        self.folders: dict[str, dict[str, list[Version]]] = defaultdict(dict)
        self.created: list[tuple[str, int]] = []
        self.operations: Counter[str] = Counter()
        self._delays: dict[tuple[str, int], float] = {}

    def versions(self, name: str) -> list[Version]:
        folder, _, base = name.rpartition("/")
        return self.folders[folder].setdefault(base, [])

    def plant(self, name: str, document: Any) -> None:
        """A file that was there before anybody came."""
        self.versions(name).append(Version(float("-inf"), -1, document))

    def seen_at(self, version: Version, name: str, reader: int) -> float:
        """When a rank sees a version that another wrote."""
        if version.writer == reader:
            return version.time
        if reader in self.faults.lags:
            return version.time + self.faults.lags[reader]
        if not self.faults.late:
            return version.time
        if (name, reader) not in self._delays:
            draw = Random(f"{self.faults.seed}/late/{name}/{reader}")
            self._delays[name, reader] = draw.uniform(0, self.faults.late)
        return version.time + self._delays[name, reader]


class View:
    """A `pipeline.utils.shared_dir.SharedDir`: the disk as one rank sees it."""

    def __init__(self, disk: Disk, rank: int, *, mortal: bool = True) -> None:
        self._disk, self._rank = disk, rank
        self._death = disk.faults.deaths.get(rank) if mortal else None
        self._stall = disk.faults.stalls.get(rank) if mortal else None
        self._tears: dict[str, int] = {}
        self.operations = 0
        self.stalled = 0.0

    def create(self, name: str, document: Any) -> bool:
        self._operate("create")
        versions = self._disk.versions(name)
        if versions:
            return False
        versions.append(Version(self._disk.clock.now(), self._rank, document))
        self._disk.created.append((name, self._rank))
        return True

    def replace(self, name: str, document: Any) -> None:
        self._operate("replace")
        self._disk.versions(name).append(Version(self._disk.clock.now(), self._rank, document))

    def read(self, name: str, kind: type) -> Any:
        self._operate("read")
        seen = [version for version in self._disk.versions(name) if self._sees(version, name)]
        if not seen or self._is_torn(name):
            return None
        return seen[-1].document if isinstance(seen[-1].document, kind) else None

    def names(self, folder: str = "") -> tuple[str, ...]:
        self._operate("list")
        prefix = f"{folder}/" if folder else ""
        files = self._disk.folders[folder].items()
        return tuple(name for name, found in files if any(self._sees(version, prefix + name) for version in found))

    def has(self, name: str) -> bool:
        self._operate("look")
        return any(self._sees(version, name) for version in self._disk.versions(name))

    def _operate(self, kind: str) -> None:
        if self.operations == self._death:
            raise Crashed
        since, until = self._disk.faults.outages.get(self._rank, (math.inf, math.inf))
        if since <= self._disk.clock.now() < until:
            raise OSError(errno.EIO, "Input/output error")
        if self._stall and self.operations == self._stall[0]:
            self.stalled, self._stall = self._stall[1], None
        self.operations += 1
        self._disk.operations[kind] += 1

    def _sees(self, version: Version, name: str) -> bool:
        return self._disk.seen_at(version, name, self._rank) <= self._disk.clock.now()

    def _is_torn(self, name: str) -> bool:
        if not self._disk.faults.torn:
            return False
        if name not in self._tears:
            draw = Random(f"{self._disk.faults.seed}/torn/{name}/{self._rank}")
            self._tears[name] = draw.randint(0, self._disk.faults.torn)
        self._tears[name] -= 1
        return self._tears[name] >= 0
