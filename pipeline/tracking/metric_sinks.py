"""Whether metrics go to wandb, and the trainer's side of it.

Owns the choice of the mode, and the process that talks to wandb (`pipeline.tracking.wandb_process`). Promises that
wandb's absence, failure or silence never stops or delays training: it runs in a process of its own that reads
`metrics.jsonl`, so the trainer neither imports it nor hands it anything; that its end is told once; and that offline it
writes below the run's tracking folder only and asks no network.
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
    """The sink that `tracking.wandb` asks for, or none.

    Args:
        variables: the environment, for wandb's key and as that of its process.
        seconds: time that wandb has at the end to send what is left.
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


def chosen_mode(asked: str, variables: Mapping[str, str], logins: Path) -> str:
    """`online`, `offline` or `off`; `auto` is online with a key in wandb's variable or a login in the netrc file."""
    if asked != "auto":
        return asked
    return "online" if variables.get("WANDB_API_KEY") or _has_login(logins) else "offline"


def _has_login(logins: Path) -> bool:
    try:
        return netrc(logins).authenticators("api.wandb.ai") is not None
    except (OSError, NetrcParseError):
        return False


class WandbSink:
    """The process that follows `metrics.jsonl` for wandb, from here to `close`."""

    def __init__(self, paths: AttemptPaths, mode: str, variables: Mapping[str, str], seconds: float) -> None:
        """Start it; returns at once."""
        folder, self._seconds, self._gone = RunPaths(paths.run).tracking, seconds, False
        self._end = folder / f"{paths.attempt}.end"
        described = (str(paths.run), paths.run_id, str(self._end), mode)
        argv = (sys.executable, "-P", "-m", "pipeline.tracking.wandb_process", *described)
        self._child = Child(argv, folder / "wandb.log", {**variables, **_places(folder, mode)})

    def write(self, row: MetricRecord) -> None:
        """Only look whether wandb still follows: it reads the row from the file."""
        code = self._child.poll()
        if code is not None:
            self._warn(describe_exit(code))

    def close(self) -> None:
        """Let wandb send what is left, for as long as it may; afterwards its process is gone."""
        try:
            self._end.touch()
            code = wait_for("wandb to end", self._child.poll, self._seconds)
        except DeadlineError:
            code = self._child.kill()
        except OSError as error:
            self._child.kill()
            self._warn(f"could not be told to end and was killed ({error})")
            return
        if code != 0:
            self._warn(describe_exit(code))

    def _warn(self, what: str) -> None:
        if not self._gone:
            self._gone = True
            _log.warning("metrics go to metrics.jsonl only: wandb's process %s: %s", what, self._last_words())

    def _last_words(self) -> str:
        try:
            return "; ".join(tail(self._child.log, 1))
        except OSError as error:
            return f"its log cannot be read ({error})"


def _places(folder: Path, mode: str) -> dict[str, str]:
    """Where wandb may write, and that it reports nothing of its own; online it still needs the user's settings."""
    places = {"WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
    if mode == "offline":
        places |= {"WANDB_CONFIG_DIR": "config"}
    return {name: str(folder / place) for name, place in places.items()} | {"WANDB_ERROR_REPORTING": "false"}
