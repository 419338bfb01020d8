"""The profile of a trainer process during a step, and the allocations of its GPU over several steps.

Owns the files of one process: `<step>.rank-<rank>.json.gz`, a trace of torch's profiler for Perfetto or
chrome://tracing, and `<step>.rank-<rank>.memory.pickle`, a snapshot for https://docs.pytorch.org/memory_viz. Promises
that these files never exceed the limit together, and that a trace which cannot be written costs no step. Must not know
models or jobs.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

MAX_ALLOCATIONS = 1 << 17
"""Allocations and frees in a snapshot, the newest ones; each takes up to several KB, with its stack."""


class RankTraces:
    """Records of this process; `begin` and `end` are called in the thread that computes."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._records_memory = self._is_full = False
        self._bytes = 0

    def begin(self, *, profiled: bool, memory: bool) -> None:
        """Start the profile of a step, and the record of allocations unless it is running; nothing at the limit."""
        if self._is_full:
            return
        if memory and not self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")
            self._records_memory = True
        if profiled:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def end(self, stem: Path, limit: int, *, snapshot: bool) -> list[Path]:
        """Write the step's trace, and with `snapshot` the allocations so far; the files within `limit` bytes.

        `stem` is the files' path without their suffixes.
        """
        files = []
        if self._profile is not None:
            finished, self._profile = self._profile, None
            finished.stop()
            files.append(self._written(stem, ".json.gz", finished.export_chrome_trace, limit))
        if snapshot and self._records_memory:
            files.append(self._written(stem, ".memory.pickle", torch.cuda.memory._dump_snapshot, limit))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records_memory = False
        return [file for file in files if file is not None]

    def _written(self, stem: Path, suffix: str, write: Callable[[str], object], limit: int) -> Path | None:
        """The file that `write` makes; None, with a warning, if the disk refuses it or it exceeds the limit."""
        if self._is_full:
            return None
        file = stem.with_name(stem.name + suffix)
        part = stem.with_name(f".part-{stem.name}{suffix}")  # the suffix chooses the compression
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(str(part))
            size = part.stat().st_size
            if self._bytes + size > limit:
                self._is_full = True
                log.warning(
                    "%s is removed and nothing more is recorded: %d bytes, with %d before, exceed debug.trace_bytes=%d",
                    *(file.name, size, self._bytes, limit),
                )
                part.unlink()
                return None
            part.replace(file)
        except OSError as error:
            log.warning("%s is not written: %s", file, error)
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return None
        self._bytes += size
        return file
