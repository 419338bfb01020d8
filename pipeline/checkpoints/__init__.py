"""Committed checkpoints on any filesystem that fsspec knows.

Owns the form of a checkpoint, which of them counts, and which are kept. Promises that a checkpoint is whole or does not
exist, that the newest committed one survives everything done here, and that a half-written one is never loaded. Must
not know the model or the algorithm: it takes a tree of (sharded) tensors and a `TrainerState`.

    checkpoints/OWNER                    the attempt that may write (see `fence`)
    checkpoints/rl-50/COMMIT             written last; names the attempt below and the hash of its manifest
    checkpoints/rl-50/<attempt>/         shards, `state.msgpack`, and `manifest.json` with sizes and hashes of both

Each attempt writes into a folder of its own, so what a killed or cut-off attempt left is never mixed with a live one's
files, and the same order of writes is safe on a disk and on an object store (no rename is needed). This package is
light; the parts that need torch are `pipeline.checkpoints.sharded` and `pipeline.checkpoints.background`:

    root = root_of(config, run, run_id)               or kept_root(run): what the run directory says
    Fence(root, attempt).claim()                      rank 0, once, when an attempt starts
    found = newest_committed(root)
    if found: state = load(found, worker.state())     every rank
    save(root, attempt, state, worker.state())        every rank
    prune(root, keep=2)                               rank 0
"""

from pipeline.checkpoints.fence import Fence
from pipeline.checkpoints.location import kept_root, root_of, tell_newest
from pipeline.checkpoints.state import JOBS, Alone, Job, TrainerState
from pipeline.checkpoints.store import Checkpoint, newest_committed, prune

__all__ = [
    "JOBS",
    "Alone",
    "Checkpoint",
    "Fence",
    "Job",
    "TrainerState",
    "kept_root",
    "newest_committed",
    "prune",
    "root_of",
    "tell_newest",
]
