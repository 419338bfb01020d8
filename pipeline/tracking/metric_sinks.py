"""The trainer's side of tracking: one sink for each tracker, which starts and ends the tracker's process.

A missing, failing or hanging tracker never stops or delays training: its process (`pipeline.tracking.tracker_process`)
reads `metrics.jsonl`. Its failure is logged once.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError
from pipeline.run.metrics_log import MetricRecord, Sink
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.tracking.tracker_protocol import Mode, Tracker, is_installed, tracker_class
from pipeline.utils.subprocesses import Child, describe_exit, tail
from pipeline.utils.waiting import wait_for

CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)


def tracking_sinks(
    config: RunConfig, paths: AttemptPaths, variables: Mapping[str, str] = os.environ, seconds: float = CLOSE_SECONDS
) -> list[Sink]:
    """A sink for each of `tracking.trackers` whose process could be started.

    Args:
        variables: the environment of the processes, which may have keys for the services.
        seconds: time limit of each for sending the remaining rows at the end.
    """
    sinks: list[Sink] = []
    for name in dict.fromkeys(config.tracking.trackers):  # runs of older code may name one twice
        kind = tracker_class(name)
        mode = chosen_mode(config.tracking.mode, kind, variables, Path.home())
        if not is_installed(kind.package):
            _log.warning("metrics are not logged to %s: %s is not installed", name, kind.package)
            continue
        try:
            sinks.append(TrackerSink(name, paths, mode, variables, seconds))
        except OSError as error:
            _log.warning("metrics are not logged to %s: its process cannot be started: %s", name, error)
    return sinks


def chosen_mode(setting: str, kind: type[Tracker], variables: Mapping[str, str], home: Path) -> Mode:
    """The mode of a tracker. `auto` is online if the user has a login at its service."""
    if setting == "auto":
        return "online" if kind.has_login(variables, home) else "offline"
    return "online" if setting == "online" else "offline"


class TrackerSink:
    """The child process that logs `metrics.jsonl` to a service, until `close`."""

    def __init__(
        self, name: str, paths: AttemptPaths, mode: Mode, variables: Mapping[str, str], seconds: float
    ) -> None:
        """Start the process; returns at once."""
        folder, self._seconds, self._has_warned = RunPaths(paths.run).tracking, seconds, False
        self._name, self._end = name, folder / f"{name}.{paths.attempt}.end"
        self._end.unlink(missing_ok=True)  # of an earlier trainer process of this attempt, which a restart replaced
        arguments = (name, str(paths.run), paths.run_id, str(self._end), mode)
        argv = (sys.executable, "-P", "-m", "pipeline.tracking.tracker_process", *arguments)
        own = tracker_class(name).variables(folder, mode)
        environment = {key: value for key, value in {**variables, **own}.items() if own.get(key) != ""}
        self._child = Child(argv, folder / f"{name}.log", environment)

    def write(self, row: MetricRecord) -> None:
        """Check that the process still runs. The process reads the row from the file."""
        code = self._child.poll()
        if code is not None:
            self._warn(describe_exit(code))

    def close(self) -> None:
        """Let the tracker send the remaining rows within the time limit, then end its process."""
        try:
            self._end.touch()
            code = wait_for(f"{self._name} to end", self._child.poll, self._seconds)
        except DeadlineError:
            code = self._child.kill()
        except OSError as error:
            self._child.kill()
            self._warn(f"could not be stopped by its end file and was killed ({error})")
            return
        if code != 0:
            self._warn(describe_exit(code))

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("metrics are not logged to %s: its process %s: %s", self._name, problem, self._last_line())

    def _last_line(self) -> str:
        try:
            return "; ".join(tail(self._child.log, 1))
        except OSError as error:
            return f"its log cannot be read ({error})"
