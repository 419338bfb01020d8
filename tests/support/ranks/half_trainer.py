"""A trainer that is killed in the middle of an update.

python -m tests.support.ranks.half_trainer <point> <server> <model>
"""

import os
import signal
import sys
from pathlib import Path

import torch

from pipeline.config import InferenceConfig
from pipeline.inference.weight_sync.rank_orders import RankOrders
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient, count_processes
from pipeline.inference.weight_sync.server_sync import MeetingPoint, ServerSync
from pipeline.inference.weight_sync.transports.gloo import WeightLayout, create_store
from pipeline.inference.weight_sync.weight_snapshot import WeightSnapshot
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import Deadline
from tests.support.servers.vllm import SECRET, TRAINER, a_model, parameters, port_of


def main(point: str, server: str, model: str) -> None:
    """Meet the server, begin an update, and die when half of the bytes are sent, or when the server is paused."""
    tensors = parameters(a_model(Path(model), seed=0))
    layout = WeightLayout.of(tensors)
    deadline = Deadline("half an update", 60)
    with hold_port() as holder, ServerAdminClient(server, SECRET) as control:
        meeting = MeetingPoint(TRAINER, port_of(holder), SECRET)
        store = create_store(TRAINER, meeting.port, SECRET, 60)
        orders, source = RankOrders(store), RowSource(layout)
        orders.sources = (source,)
        link = ServerSync(server, meeting, InferenceConfig(update_seconds=60), lambda server, version: None, orders)
        link._processes = count_processes(control, deadline)
        link._meet(control, WeightSnapshot(1, source, layout.pack(tensors), {}, torch.device("cpu")), deadline)
        group = link._routes[0].group  # the other processes of a server get nothing
        control.post("/collective_rpc", deadline, method="begin_update")
        if point == "sending":
            group.send(1, torch.zeros(layout.bytes // 2, dtype=torch.uint8), deadline)
        else:
            group.send(1, layout.pack(tensors), deadline)
            control.post("/pause?mode=keep&clear_cache=false", deadline)
        os.kill(os.getpid(), signal.SIGKILL)
        del store


if __name__ == "__main__":
    main(*sys.argv[1:])
