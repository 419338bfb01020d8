"""What each process of torchrun runs for `test_shield`: a trainer's world that is ready and then idle.

torchrun --nproc-per-node 2 -m tests.support.ranks.idle_ranks
"""

import os
import time

from pipeline.train.batching.packing import Budget
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import end_with_lost_ranks
from pipeline.utils import heartbeat, subprocesses

READY = "all ranks have met"


def lead(dispatch: RankGroup) -> None:
    print(READY, flush=True)
    while True:
        dispatch.keepalive()
        time.sleep(0.1)


if __name__ == "__main__":
    subprocesses.exit_with_parent()
    heartbeat.start(int(os.environ["LOCAL_RANK"]))
    end_with_lost_ranks()
    run_controller_or_worker(lead, Budget(64))
