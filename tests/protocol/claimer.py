"""One process that claims GPUs: says what it got, in JSON, and holds it until its input ends.

    python -m tests.protocol.claimer FOLDER GPUS NEEDS RUN_ID RANK      # three GPUs, two seats: … 3 2,1 demo 0

It begins when it may read a line, so that many begin at once.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

from slurm.agent.gpu_locks import Claimant, claim_gpus
from slurm.agent.preflight import Gpu

if __name__ == "__main__":
    folder, gpus, needs, run_id, rank = sys.argv[1:]
    machine = [Gpu(index=index, uuid=f"GPU-{index:04}") for index in range(int(gpus))]
    claimant = Claimant(run_id=run_id, attempt="local-0", rank=int(rank))
    sys.stdin.readline()
    with ExitStack() as held:
        claimed = claim_gpus(machine, [int(need) for need in needs.split(",")], claimant, held, Path(folder))
        print(json.dumps([[gpu.index for gpu in claimed.gpus], claimed.problem]), flush=True)
        sys.stdin.read()
