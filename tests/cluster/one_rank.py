"""A trainer of jobs without torch, for `test_train`: its only process is told to end once, and then ends the job."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.system.waiting import wait_for
from pipeline.training.jobs import read_job
from pipeline.training.standalone.log import JobLog
from pipeline.training.standalone.stop import Stop
from slurm.launch.train import QueuedTrainer

IMPORTS_SECONDS = 1.0
"""How long a trainer's rank is there before it touches its log: longer than the pause of who follows it."""


@dataclass(frozen=True)
class OneRank(QueuedTrainer):
    """A `QueuedTrainer` whose process is this module's."""

    def _command(self, stop: Stop) -> list[str]:
        return [sys.executable, "-m", "tests.cluster.one_rank", str(self.path), str(stop.path)]


def main(file: Path, stop: Stop) -> None:
    told, mark = JobLog(Path(read_job(file).log)), file.with_suffix(".begun")
    time.sleep(IMPORTS_SECONDS)
    told.clear()
    if mark.exists():
        told.write("finished", output="the second attempt")
        return
    mark.touch()
    told.write("step", step=1, of=2)
    wait_for("the notice", lambda: stop.asked, 60)
    told.write("interrupted", step=1, of=2)
    stop.answer()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Stop(Path(sys.argv[2])))
