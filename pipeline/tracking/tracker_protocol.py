"""The interface of a tracker, and the list of trackers: the modules in `pipeline.tracking.trackers`."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import ClassVar, Literal

from pipeline.config import RunConfig, closest_match
from pipeline.errors import ConfigError
from pipeline.run.metric_names import HEAD
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.tracking import trackers
from pipeline.utils.optional_extras import pip_install

Mode = Literal["online", "offline"]


class Tracker(ABC):
    """A run at a tracking service.

    The trainer reads the class attributes and static methods to start a process. The process creates one object for the
    attempt. All attempts of a run are one run at the service, with the run_id as its id.

        tracker = Tracker(config, run_id, folder, mode)
        for number, row in ...:                    # every row of `metrics.jsonl` that the service does not have yet
            tracker.log(row, number)
        note = tracker.finish()
    """

    package: ClassVar[str]
    """The Python package of the service. Without it a submission is refused; in a trainer whose environment lacks it,
    the run has a warning and no tracker."""

    project_pattern: ClassVar[str] = ".+"
    """A regular expression for the names of projects that the service accepts."""

    project_rule: ClassVar[str] = "a name"
    """`project_pattern` in words, for errors."""

    @staticmethod
    def has_login(variables: Mapping[str, str], home: Path) -> bool:
        """Whether `tracking.mode=auto` is online: the user has a key for the service."""
        return False

    @staticmethod
    def variables(folder: Path, mode: Mode) -> Mapping[str, str]:
        """Environment variables for the process, such as those that keep files of the service below `folder`. An empty
        value removes the variable."""
        return {}

    @staticmethod
    def upload_command(paths: RunPaths) -> str:
        """The command that uploads what was logged offline; empty if there is nothing to upload."""
        return ""

    @abstractmethod
    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        """Start or resume the service's run of `run_id`, with its files below `folder`."""

    @property
    def received(self) -> int | None:
        """The number of rows that the service has, of all attempts; None if it does not report it."""
        return None

    def start_over(self) -> bool:
        """Drop all rows of all attempts; False if the service cannot.

        Called before the first row, and after a rollback has dropped rows of `metrics.jsonl`. After True, all rows of
        `metrics.jsonl` are logged again.
        """
        return False

    @abstractmethod
    def log(self, row: MetricRecord, number: int) -> None:
        """Log a row, whose index among all logged rows is `number`. `metrics_of` has its metrics."""

    def idle(self) -> None:
        """Called repeatedly while `metrics.jsonl` has no row that was not logged."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Send the remaining rows. The process ends afterwards."""


def logged_rows(folder: Path, name: str) -> Path:
    """The file of the rows that a tracker has logged, below the run's tracking folder."""
    return folder / f"{name}.logged.jsonl"


def metrics_of(row: MetricRecord) -> dict[str, float]:
    """The numbers of a row, for a service that gets the step separately. Rows of SFT have names below `sft/`; those of
    preference training likewise."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in HEAD}
    return {f"{_prefix(row)}{name}": value for name, value in numbers.items()}


def numbers_of(row: MetricRecord) -> dict[str, float]:
    """`metrics_of`, and the step axis as one more number."""
    return metrics_of(row) | {axis_of(row): row["step"]}


def axis_of(row: MetricRecord) -> str:
    """The name of the step axis: `step`, for rows of SFT `sft/step`."""
    return f"{_prefix(row)}step"


def _prefix(row: MetricRecord) -> str:
    return "" if row["job"] == "rl" else f"{row['job']}/"


def tracker_names() -> list[str]:
    """Every value of `tracking.trackers`."""
    return sorted(module.name for module in iter_modules(trackers.__path__))


def tracker_class(name: str) -> type[Tracker]:
    """The class of a tracker; `ConfigError` if there is none of that name."""
    if name not in tracker_names():
        expected = f"names of {', '.join(tracker_names())}, or an empty list"
        raise ConfigError("tracking.trackers", name, expected, closest_match(name, tracker_names()))
    kind: type[Tracker] = import_module(f"{trackers.__name__}.{name}").Tracker
    return kind


def check_trackers(config: RunConfig) -> None:
    """`ConfigError` if the config names a tracker that does not exist, whose package is not installed, or which refuses
    the name of the project. A run that has begun keeps its project, and a tracker that it names twice."""
    names, has_begun = config.tracking.trackers, RunPaths(config.directory).run.exists()
    if not has_begun and (repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]):
        raise ConfigError("tracking.trackers", list(names), "each name once", f"leave out one {repeated[0]}")
    for name in names:
        kind = tracker_class(name)
        if not has_begun and not re.fullmatch(kind.project_pattern, config.tracking.project):
            raise ConfigError("tracking.project", config.tracking.project, f"{kind.project_rule}, for {name}")
        if not is_installed(kind.package):
            hint = f"{pip_install(name)} (the extra `{name}`), or tracking=none"
            raise ConfigError("tracking.trackers", name, f"the installed package {kind.package}", hint)


def is_installed(package: str) -> bool:
    """Whether the package can be imported in this environment."""
    try:
        return find_spec(package) is not None
    except ValueError:  # an entry of `sys.modules` without a spec
        return False


def upload_commands(paths: RunPaths) -> list[str]:
    """The commands that upload what trackers logged offline."""
    commands = [tracker_class(name).upload_command(paths) for name in tracker_names()]
    return [command for command in commands if command]
