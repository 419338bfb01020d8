"""Trackio (https://github.com/gradio-app/trackio).

Online, the Space of `TRACKIO_SPACE_ID` or the server of `TRACKIO_SERVER_URL`; offline, SQLite files in
`tracking/trackio/` of the run directory:

    TRACKIO_DIR=runs/<name>/tracking/trackio trackio show

No other module imports trackio.
"""

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.tracking import tracker_protocol
from pipeline.tracking.tracker_protocol import Mode, metrics_of

_ADDRESSES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Tracker(tracker_protocol.Tracker):
    """One run of Trackio, with the run_id as its name. Each step is logged once."""

    package = "trackio"

    @staticmethod
    def has_login(variables: Mapping[str, str], home: Path) -> bool:
        """With the address of a Space or a server in the environment."""
        return any(variables.get(name) for name in _ADDRESSES)

    @staticmethod
    def variables(folder: Path, mode: Mode) -> Mapping[str, str]:
        """Direct Trackio's files below `folder`; offline, to nowhere else."""
        addresses = dict.fromkeys(_ADDRESSES, "") if mode == "offline" else {}
        return {"TRACKIO_DIR": str(folder / "trackio"), **addresses}

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        import trackio

        self._is_online, self._project, self._name = mode == "online", config.tracking.project, run_id
        settings = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run: Any = trackio.init(self._project, run_id, config=config.model_dump(mode="json"), **settings)

    @property
    def received(self) -> int | None:
        """The rows of the SQLite file, which Trackio writes a moment after `log`; online it does not report them."""
        from trackio.sqlite_storage import SQLiteStorage

        return None if self._is_online else len(SQLiteStorage.get_logs(self._project, self._name))

    def log(self, row: MetricRecord, number: int) -> None:
        self._run.log(metrics_of(row), step=row["step"])

    def finish(self) -> None:
        self._run.finish()


def show(host: str, port: int) -> None:
    """Serve Trackio's dashboard of the files in `TRACKIO_DIR`, until an interrupt."""
    import trackio

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    with suppress(KeyboardInterrupt):
        trackio.show(host=host, server_port=port, open_browser=False, block_thread=True)


if __name__ == "__main__":
    show(sys.argv[1], int(sys.argv[2]))
