"""Notices of an attempt: what happened in it and did not end it, one line each, for people.

Owns `notices/<publisher>.jsonl`, which one process appends to: the trainer when rollouts begin, an agent when it
abandons a server or replaces a lost node. No process acts on a notice, so a disk that fails may lose one.
"""

import time
from contextlib import suppress

import msgspec

from pipeline.run.paths import AttemptPaths
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir

_LINES = ".jsonl"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One notice, of a role or an agent, at a time in seconds since the epoch."""

    time: float
    by: str
    text: str


def publish_notice(paths: AttemptPaths, by: str, text: str) -> None:
    """Append a notice to those of its publisher."""
    with suppress(OSError):
        line = msgspec.json.encode(Notice(time=time.time(), by=by, text=text)) + b"\n"
        shared_files.append(paths.notices / f"{by}{_LINES}", line)


def read_notices(paths: AttemptPaths) -> tuple[Notice, ...]:
    """All notices of an attempt, by time, without incomplete lines."""
    notices = []
    for name in FileSharedDir(paths.notices).names():
        with suppress(OSError):
            for line in (paths.notices / name).read_bytes().splitlines():
                with suppress(msgspec.DecodeError):
                    notices.append(msgspec.json.decode(line, type=Notice))
    return tuple(sorted(notices, key=lambda notice: notice.time))
