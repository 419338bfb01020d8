"""Committed checkpoints on any filesystem that fsspec knows.

| module | owns |
|---|---|
| `checkpoint_store`, `pruning` | which checkpoints exist and which one counts; which are removed |
| `trainer_state` | what a checkpoint holds beside tensors |
| `run_progress` | what shows that a run has committed, and what it needs to go on |
| `fencing` | who may write, and whose commits count |
| `checkpoint_location`, `fsspec_storage` | where a run keeps them; a folder of files behind a URL |
| `sharded_state`, `async_save` | saving and loading as collective operations; while training goes on |
| `shard_io`, `block_hashes`, `safe_metadata` | files of shards; block hashes; metadata without unpickling |

Owns the form of a checkpoint, which of them counts, and which are kept. Promises that a checkpoint is whole or does not
exist, that the newest committed one survives everything done here, and that a half-written one is never loaded. Must
not know the model or the algorithm: it takes a tree of (sharded) tensors and a `TrainerState`.

    checkpoints/OWNER                    the attempt that may write (see `fence`)
    checkpoints/lines/<attempt>          the commits before its own that count (see `fence`)
    checkpoints/RUN, CONFIG              copies of `run.json` and `config.json` (see `progress`)
    checkpoints/rl-50/<attempt>/         shards, `state.msgpack`, and `manifest.json` with sizes and hashes of both
    checkpoints/rl-50/<attempt>/COMMIT   written last; holds the hash of the manifest

Each attempt writes into folders of its own, so what a killed or cut-off attempt left is never mixed with a live one's
files, and the same order of writes is safe on a disk and on an object store (no rename is needed). This package is
light; the parts that need torch are `pipeline.checkpoints.sharded_state` and `pipeline.checkpoints.async_save`:

    root = root_of(config, run, run_id)               or recorded_root(run): what the run directory says
    fence.claim()                                     rank 0, once, when an attempt starts
    for found in committed(root):                     rank 0, until one can be loaded
        state = load(found, worker.state())           every rank; all of them raise `DamagedCheckpointError`, or none
    fence.keep(…)                                     rank 0: that one, and those after it
    remove_unfinished(root, attempt)                  rank 0: saves of earlier attempts that did not end
    done = save(root, attempt, state, worker.state()) every rank
    prune(done, keep=2)                               rank 0
"""

from pipeline.checkpoints.checkpoint_location import log_newest, recorded_root, root_of
from pipeline.checkpoints.checkpoint_store import Checkpoint, complete_checkpoints, newest_checkpoint
from pipeline.checkpoints.fencing import Fence
from pipeline.checkpoints.pruning import prune, remove_unfinished
from pipeline.checkpoints.trainer_state import PHASES, OfflineProgress, PhaseName, TrainerState

__all__ = [
    "PHASES",
    "Checkpoint",
    "Fence",
    "OfflineProgress",
    "PhaseName",
    "TrainerState",
    "complete_checkpoints",
    "log_newest",
    "newest_checkpoint",
    "prune",
    "recorded_root",
    "remove_unfinished",
    "root_of",
]
