"""The choice of wandb's mode, and the trainer's side of tracking.

A missing, failing or hanging wandb never stops or delays training: it runs in a separate process
(`pipeline.tracking.wandb_process`) that reads `metrics.jsonl`. Its end is logged once. In offline mode it writes only
below the run's tracking folder and uses no network.
"""

import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError
from pipeline.run.metrics_log import MetricRecord, Sink
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.subprocesses import Child, describe_exit, tail
from pipeline.utils.waiting import wait_for

CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)


def tracking_sinks(
    config: RunConfig, paths: AttemptPaths, variables: Mapping[str, str] = os.environ, seconds: float = CLOSE_SECONDS
) -> list[Sink]:
    """The sink that `tracking.wandb` selects, or none.

    Args:
        variables: the environment of wandb's process, which may have wandb's key.
        seconds: time limit for sending the remaining rows at the end.
    """
    mode = chosen_mode(config.tracking.wandb, variables, Path.home() / ".netrc")
    if mode == "off":
        return []
    if find_spec("wandb") is None:
        _log.warning("metrics go to metrics.jsonl only: wandb is not installed")
        return []
    try:
        return [WandbSink(paths, mode, variables, seconds)]
    except OSError as error:
        _log.warning("metrics go to metrics.jsonl only: wandb's process cannot be started: %s", error)
        return []


def chosen_mode(setting: str, variables: Mapping[str, str], logins: Path) -> str:
    """The mode: `online`, `offline` or `off`. `auto` is online if `WANDB_API_KEY` or the netrc file has a key."""
    if setting != "auto":
        return setting
    return "online" if variables.get("WANDB_API_KEY") or _has_login(logins) else "offline"


def _has_login(logins: Path) -> bool:
    try:
        return netrc(logins).authenticators("api.wandb.ai") is not None
    except (OSError, NetrcParseError):
        return False


class WandbSink:
    """The child process that logs `metrics.jsonl` to wandb, until `close`."""

    def __init__(self, paths: AttemptPaths, mode: str, variables: Mapping[str, str], seconds: float) -> None:
        """Start the process; returns at once."""
        folder, self._seconds, self._has_warned = RunPaths(paths.run).tracking, seconds, False
        self._end = folder / f"{paths.attempt}.end"
        arguments = (str(paths.run), paths.run_id, str(self._end), mode)
        argv = (sys.executable, "-P", "-m", "pipeline.tracking.wandb_process", *arguments)
        self._child = Child(argv, folder / "wandb.log", {**variables, **_wandb_variables(folder, mode)})

    def write(self, row: MetricRecord) -> None:
        """Check that the process still runs. The process reads the row from the file."""
        code = self._child.poll()
        if code is not None:
            self._warn(describe_exit(code))

    def close(self) -> None:
        """Let wandb send the remaining rows within the time limit, then end its process."""
        try:
            self._end.touch()
            code = wait_for("wandb to end", self._child.poll, self._seconds)
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
            _log.warning("metrics go to metrics.jsonl only: wandb's process %s: %s", problem, self._last_line())

    def _last_line(self) -> str:
        try:
            return "; ".join(tail(self._child.log, 1))
        except OSError as error:
            return f"its log cannot be read ({error})"


def _wandb_variables(folder: Path, mode: str) -> dict[str, str]:
    """Environment variables that direct wandb's files below `folder` and disable its error reports."""
    folders = {"WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
    if mode == "offline":  # online, wandb needs the user's settings
        folders |= {"WANDB_CONFIG_DIR": "config"}
    return {name: str(folder / child) for name, child in folders.items()} | {"WANDB_ERROR_REPORTING": "false"}
