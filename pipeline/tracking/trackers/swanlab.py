"""SwanLab (https://swanlab.cn).

In offline mode SwanLab uses no network, and its files are in `tracking/swanlab/` of the run directory. SwanLab buffers
its file, so a killed process loses its last rows. Therefore each attempt replaces the folder by a new one with all
rows of `metrics.jsonl`. No other module imports swanlab.
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
        import swanlab

        self._is_online = mode == "online"
        (folder / "swanlab").mkdir(parents=True, exist_ok=True)
        if not self._is_online:
            for old in (folder / "swanlab").glob(_FOLDERS):
                shutil.rmtree(old)
        self._run: Any = swanlab.init(
            project=config.tracking.project,
            name=config.name,
            log_dir=str(folder / "swanlab"),
            mode=mode,
            config=config.model_dump(mode="json"),
            id=run_id,
            resume="allow",
        )

    @property
    def received(self) -> int | None:
        """Offline none, so that all rows are logged to the new folder; an upload skips steps that the service has."""
        return None if self._is_online else 0

    def log(self, row: MetricRecord, number: int) -> None:
        self._run.log({name: float(value) for name, value in metrics_of(row).items()}, step=row["step"])

    def finish(self) -> None:
        self._run.finish()
