"""TensorBoard: event files in `tracking/tensorboard/` of the run directory.

    tensorboard --logdir runs

The event files are written from `metrics.jsonl` again at each start and after each rollback, so they have the same
rows: each step once, with the numbers of the step that the current weights went through. No other module imports
tensorboard.
"""

from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.tracking import tracker_protocol
from pipeline.tracking.tracker_protocol import Mode, metrics_of

_EVENT_FILES = "events.out.tfevents.*"


class Tracker(tracker_protocol.Tracker):
    """One folder of event files for all attempts. Rows of SFT have tags below `sft/`."""

    package = "tensorboard"

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        self._folder = folder / "tensorboard"
        self._config = config.model_dump_json(indent=1)
        self._writer: Any = None

    def start_over(self) -> bool:
        """Replace the event files by a new one."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.finish()
        old = list(self._folder.glob(_EVENT_FILES))
        self._writer = EventFileWriter(str(self._folder))
        # The purge of SummaryWriter(purge_step=0): a TensorBoard that has read the old files drops their steps.
        self._writer.add_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        self._writer.add_event(Event(step=0, summary=_text("config", self._config)))
        for file in old:
            file.unlink(missing_ok=True)
        return True

    def log(self, row: MetricRecord, number: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics_of(row).items()]
        self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=Summary(value=values)))
        self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _text(tag: str, text: str) -> Any:
    """A summary for the text plugin, which shows Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{text}\n```".encode()])
    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])
