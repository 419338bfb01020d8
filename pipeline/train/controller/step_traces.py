"""Traces of some training steps on every rank, by `debug.profile_steps` and `debug.memory_steps`.

Owns which steps are traced, and the names of their files. A resumed run traces the remaining steps of the window into
the folder of its attempt. Must not know what a step does.

    traces = StepTraces(dispatch, config.debug, attempt.traces)
    with traces("rl", 5):
        ...                     # the step
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.debug_keys import DebugConfig, in_window
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState

log = logging.getLogger(__name__)


class StepTraces:
    """Traces the steps of one job of an attempt."""

    def __init__(self, dispatch: RankGroup, debug: DebugConfig, folder: Path) -> None:
        self._dispatch, self._debug, self._folder = dispatch, debug, folder

    @contextmanager
    def __call__(self, job: str, step: int) -> Iterator[None]:
        """Trace the step that the block executes, if it is in a window. `step` counts from 1."""
        profiled = in_window(self._debug.profile_steps, step)
        memory = in_window(self._debug.memory_steps, step)
        if not (profiled or memory):
            yield
            return
        self._dispatch.run_on_all_models(begin_trace, profiled, memory)
        yield  # after an error the attempt ends, and an operation may no longer be possible
        snapshot = memory and step == self._debug.memory_steps[-1]
        stem = self._folder / f"{job}-{step}"
        files = self._dispatch.run_on_all_models(end_trace, stem, self._debug.trace_bytes, snapshot)
        if written := [file for of_rank in files for file in of_rank]:
            log.info("step %d is traced: %d files %s.rank-*", step, len(written), stem)


def begin_trace(site: RankState, profiled: bool, memory: bool) -> None:
    """Runs on every rank before the step."""
    site.traces.begin(profiled=profiled, memory=memory)


def end_trace(site: RankState, stem: Path, limit: int, snapshot: bool) -> list[Path]:
    """Runs on every rank after the step; the files of this rank."""
    return site.traces.end(stem.with_name(f"{stem.name}.rank-{site.rank}"), limit, snapshot=snapshot)
