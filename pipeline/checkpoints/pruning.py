"""Removal of old and of unfinished checkpoints.

`prune` never removes the checkpoint for which it is called. Nothing is removed once another attempt has taken over. A
removal starts with the COMPLETE file, so an interrupted one leaves no folder that looks complete.
"""

import logging

from pipeline.checkpoints.checkpoint_store import (
    COMPLETE,
    Checkpoint,
    copies_of,
    folder_names,
    has_marker,
    is_newer,
    valid_copy,
)
from pipeline.checkpoints.fencing import Fence, read_ownership
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, SupersededError

_log = logging.getLogger(__name__)


def prune(newest: Checkpoint, keep: int) -> list[str]:
    """Remove checkpoints older than `newest`, except the `keep - 1` before it. Returns the removed folders.

    `newest` has just been completed. For each remaining step, the folders of other attempts are removed too; so
    remains of a killed attempt disappear once a newer checkpoint is complete. Newer folders stay untouched. Raises
    `SupersededError` if another attempt has taken over.
    """
    storage, fence = Storage(newest.root), Fence(newest.root, newest.manifest.attempt)
    # All folders are listed before the first check of the fence: none of a later owner's can be among them.
    ownership, names = read_ownership(storage), folder_names(storage)
    retained, removed = {newest.folder}, list[str]()
    # By order, not by place in the listing: a store that lists late may lack the newest folder.
    for name in filter(lambda name: not is_newer(name, newest.name), names):
        if name != newest.name and len(retained) < keep:
            retained |= valid_copy(storage, name, ownership)
        removed += [folder for folder in copies_of(storage, name) if folder not in retained]
    _remove(storage, fence, removed)
    return removed


def remove_unfinished(root: str, owner: str, *, over: bool = False) -> list[str]:
    """Remove other attempts' folders without a COMPLETE file, left by interrupted saves. Returns the removed folders.

    Call this as the owner of the run, after restoring: the other attempts have ended, or were cut off and can complete
    no checkpoint. With `over`, the owner's attempt has ended too, and its unfinished folders are removed as well. A
    folder that cannot be removed stays, with a warning, until the next `prune`. `SupersededError` if another attempt
    has taken over.
    """
    storage, fence = Storage(root), Fence(root, owner)
    try:
        folders = [folder for name in folder_names(storage) for folder in copies_of(storage, name)]
        ended = [folder for folder in folders if over or folder.partition("/")[2] != owner]
        unfinished = [folder for folder in ended if not has_marker(storage, folder)]
        _remove(storage, fence, unfinished)
    except SupersededError:
        raise
    except CheckpointError as error:
        _log.warning("unfinished checkpoints stay until the next checkpoint: %s", error)
        return []
    if unfinished:
        _log.info("removed the remains of interrupted saves: %s", ", ".join(unfinished))
    return unfinished


def complete_folders(storage: Storage) -> list[str]:
    """Folders that count and have a COMPLETE file, damaged or not, as `<job>-<step>/<attempt>`, the newest first."""
    ownership = read_ownership(storage)
    folders = [folder for name in folder_names(storage) for folder in copies_of(storage, name)]
    return [folder for folder in folders if ownership.counts(*folder.split("/")) and has_marker(storage, folder)]


def _remove(storage: Storage, fence: Fence, folders: list[str]) -> None:
    for folder in folders:
        fence.check()
        storage.remove(f"{folder}/{COMPLETE}")
        storage.remove(folder)
        storage.remove_empty(folder.partition("/")[0])
