"""SwanLab (https://swanlab.cn).

In offline mode SwanLab uses no network, and its files are in `tracking/swanlab/` of the run directory. SwanLab buffers
its file, so a killed process loses its last rows. Therefore each start, and each rollback, replaces the folder by a new
one with all rows of `metrics.jsonl`. No other module imports swanlab.
"""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.tracking import tracker_protocol
from pipeline.tracking.tracker_protocol import Mode, metrics_of

_FOLDERS = "run-*"


class Tracker(tracker_protocol.Tracker):
    """One experiment with the run_id as its id. Online, each step is logged once."""

    package = "swanlab"
    project_pattern = r"[0-9A-Za-z_.+-]{1,100}"
    project_rule = "letters, digits, `_`, `.`, `+` and `-`, at most 100"

    @staticmethod
    def has_login(variables: Mapping[str, str], home: Path) -> bool:
        """With `SWANLAB_API_KEY`, or the file that `swanlab login` writes."""
        return bool(variables.get("SWANLAB_API_KEY")) or (home / ".swanlab" / ".netrc").exists()

    @staticmethod
    def variables(folder: Path, mode: Mode) -> Mapping[str, str]:
        """Offline, direct SwanLab's settings below `folder`; online it needs the user's."""
        return {"SWANLAB_SAVE_DIR": str(folder / "swanlab-home")} if mode == "offline" else {}

    @staticmethod
    def upload_command(paths: RunPaths) -> str:
        """The command for the folder of the newest attempt, which has the rows of all attempts."""
        folder = paths.tracking / "swanlab"
        return f"swanlab sync {shlex.quote(str(folder))}/{_FOLDERS}" if any(folder.glob(_FOLDERS)) else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        self._config, self._run_id, self._folder, self._mode = config, run_id, folder / "swanlab", mode
        self._run: Any = self._start() if mode == "online" else None

    def _start(self) -> Any:
        import swanlab

        self._folder.mkdir(parents=True, exist_ok=True)
        return swanlab.init(
            project=self._config.tracking.project,
            name=self._config.name,
            log_dir=str(self._folder),
            mode=self._mode,
            config=self._config.model_dump(mode="json"),
            id=self._run_id,
            resume="allow",
        )

    def start_over(self) -> bool:
        """Offline, replace the folders of all attempts by a new one."""
        if self._mode == "online":
            return False
        self.finish()
        for folder in self._folder.glob(_FOLDERS):
            shutil.rmtree(folder)
        self._run = self._start()
        return True

    def log(self, row: MetricRecord, number: int) -> None:
        self._run.log({name: float(value) for name, value in metrics_of(row).items()}, step=row["step"])

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
