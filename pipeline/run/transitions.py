"""The timeline of an attempt: one line per change of a role's state, written by the agent of its rank."""

from pathlib import Path
from typing import Annotated

import msgspec

from pipeline.run.paths import AttemptPaths, rank_of_timeline
from pipeline.utils.shared_dir import FileSharedDir

_MAX_TIME = 1e11
"""A line with a later time, of a year above 5000, is damaged."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a role's state: one line of a rank's timeline, written by its agent."""

    time: Annotated[float, msgspec.Meta(ge=0, lt=_MAX_TIME)]
    role: str
    rank: int
    state: str
    detail: str = ""


def timeline_ranks(paths: AttemptPaths) -> list[int]:
    """The ranks that have a timeline, sorted."""
    names = FileSharedDir(paths.timeline).names()
    return sorted(rank for name in names if (rank := rank_of_timeline(name)) is not None)


def read_timeline(timeline: Path) -> list[Transition]:
    """The transitions of one rank, without damaged lines and an incomplete last one."""
    transitions = []
    for line in timeline.read_bytes().splitlines():
        try:
            transitions.append(msgspec.json.decode(line, type=Transition))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return transitions


def read_transitions(paths: AttemptPaths, ranks: int | None = None) -> tuple[Transition, ...]:
    """The transitions of all ranks, or of the first `ranks` ones, in the order of time."""
    lines = [line for rank in timeline_ranks(paths)[:ranks] for line in read_timeline(paths.timeline_of(rank))]
    return tuple(sorted(lines, key=lambda transition: transition.time))
