"""One of two ranks on different machines: `python -m tests.cluster.gloo_ranks RANK ADDRESS STORE PORT BOUND`.

Exchanges weights as trainer and server do, then sums over both ranks as the trainer's processes do, with gloo bound to
the interface of ADDRESS if BOUND is 1. The store is at rank 0's address STORE.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.inference.weight_sync.transports.gloo import TRAINER, TransferGroup, connect_store, create_store
from pipeline.utils.network_interfaces import interface_of
from pipeline.utils.waiting import Deadline

SECONDS = 30.0


def main(rank: int, address: str, store_address: str, port: int, bound: bool) -> None:
    store = (create_store if rank == TRAINER else connect_store)(store_address, port, "secret", SECONDS)
    group, deadline = TransferGroup(store, "weights", rank, address, SECONDS), Deadline("the exchange", SECONDS)
    buffer = torch.full((1000,), 7 if rank == TRAINER else 0, dtype=torch.uint8)
    if rank == TRAINER:
        group.send(3, buffer, deadline)
    else:
        print(f"weights {group.receive(buffer, deadline)}: {int(buffer.sum())}", flush=True)
    if bound:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address) or ""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print(f"sum {total.item()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "1")
