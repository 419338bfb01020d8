"""Atomic checkpoints on any filesystem that fsspec supports.

| module | owns |
|---|---|
| `checkpoint_store`, `pruning` | which checkpoints exist and which one counts; which are removed |
| `trainer_state` | the content of a checkpoint in addition to tensors |
| `run_progress` | the evidence that a run has saved a checkpoint, and the files that it needs to resume |
| `fencing` | which attempt may write, and which checkpoints count |
| `checkpoint_location`, `fsspec_storage` | the address of a run's checkpoints; a folder of files behind a URL |
| `sharded_state`, `async_save` | saving and loading as collective operations; saving in the background of training |
| `shard_io`, `block_hashes`, `safe_metadata` | files of shards; block hashes; metadata without unpickling |

Owns the layout of a checkpoint, which checkpoints count, and which are removed. Promises that a checkpoint is complete
or does not exist, that the newest complete one survives every operation, and that an incomplete one is never loaded.
Must not know the model or the algorithm: the input is a tree of (sharded) tensors and a `TrainerState`.

    checkpoints/OWNER                    the attempt that may write (`fencing`)
    checkpoints/ancestry/<attempt>       its ancestry: the earlier checkpoints that count (`fencing`)
    checkpoints/RUN, CONFIG              copies of `run.json` and `config.json` (`run_progress`)
    checkpoints/rl-50/<attempt>/         shards, `state.msgpack`, and `manifest.json` with sizes and hashes of both
    checkpoints/rl-50/<attempt>/COMPLETE written last, with the hash of the manifest: the checkpoint is complete

Each attempt writes into separate folders, so the remains of a killed or cut-off attempt never mix with the files of a
running one. No rename is needed, so the order of writes is safe on a disk and on an object store. This package imports
no torch, except in `pipeline.checkpoints.sharded_state`, `async_save`, `shard_io` and `safe_metadata`:

    root = root_of(config, run, run_id)                     or recorded_root(run), from the run directory
    fence.claim()                                           rank 0, once, when an attempt starts
    for checkpoint in complete_checkpoints(root):           rank 0, until one can be loaded
        state = load_shards(checkpoint, worker.state())     every rank; all raise `DamagedCheckpointError`, or none
    fence.keep(…)                                           rank 0: that checkpoint and the older ones
    remove_unfinished(root, attempt)                        rank 0: interrupted saves of earlier attempts
    checkpoint = save(root, attempt, state, worker.state()) every rank
    prune(checkpoint, keep=2)                               rank 0
"""

from pipeline.checkpoints.checkpoint_location import log_newest, recorded_root, root_of
from pipeline.checkpoints.checkpoint_store import Checkpoint, complete_checkpoints, newest_checkpoint
from pipeline.checkpoints.fencing import Fence, attempt_of, writer_of
from pipeline.checkpoints.pruning import prune, remove_unfinished
from pipeline.checkpoints.trainer_state import PHASES, OfflineProgress, PhaseName, TrainerState

__all__ = [
    "PHASES",
    "Checkpoint",
    "Fence",
    "OfflineProgress",
    "PhaseName",
    "TrainerState",
    "attempt_of",
    "complete_checkpoints",
    "log_newest",
    "newest_checkpoint",
    "prune",
    "recorded_root",
    "remove_unfinished",
    "root_of",
    "writer_of",
]
