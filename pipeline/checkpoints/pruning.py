"""Which checkpoints are removed.

Owns the removal of old checkpoints and of unfinished ones. Promises that `prune` never removes the commit that it is
called for; that nothing is removed once another attempt took over; and that a removal which is cut short leaves nothing
that looks committed. Must not know torch.
"""

import logging

from pipeline.checkpoints.checkpoint_store import COMMIT, Checkpoint, copies_of, folder_names, valid_copy
from pipeline.checkpoints.fencing import Fence, read_ownership
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, SupersededError

_log = logging.getLogger(__name__)


def prune(newest: Checkpoint, keep: int) -> list[str]:
    """Remove what is older than `newest`, which was just committed, and the `keep - 1` commits before it; what went.

    Of those that stay, the folders of other attempts go too. Whatever is younger stays untouched. Left-overs of a dead
    attempt go once a newer checkpoint is committed. Everything is listed first, and `SupersededError` ends the removal
    when another attempt took over: what is listed is then none of that one's. A removal begins with COMMIT, so one that
    is cut short leaves nothing that looks committed.
    """
    storage, fence = Storage(newest.root), Fence(newest.root, newest.manifest.attempt)
    counting, names = read_ownership(storage), folder_names(storage)
    kept, doomed = {newest.place}, list[str]()
    for name in names[names.index(newest.name) :]:
        if name != newest.name and len(kept) < keep:
            kept |= valid_copy(storage, name, counting)
        doomed += [place for place in copies_of(storage, name) if place not in kept]
    _remove(storage, fence, doomed)
    return doomed


def remove_unfinished(root: str, owner: str, *, over: bool = False) -> list[str]:
    """Remove the folders of other attempts than `owner` that have no COMMIT: saves that did not end; what went.

    For whoever owns the run and has restored from it: such an attempt is over, or was cut off and may commit no more;
    or, with `over`, for whoever knows that the owner's attempt is over too: then its own go as well. A
    folder that cannot be removed stays, with a warning; `prune` tries again. `SupersededError` if another attempt took
    over.
    """
    storage, fence = Storage(root), Fence(root, owner)
    try:
        places = [place for name in folder_names(storage) for place in copies_of(storage, name)]
        ended = [place for place in places if over or place.partition("/")[2] != owner]
        unfinished = [place for place in ended if COMMIT not in storage.sizes(place)]
        _remove(storage, fence, unfinished)
    except SupersededError:
        raise
    except CheckpointError as error:
        _log.warning("unfinished checkpoints stay until the next commit: %s", error)
        return []
    if unfinished:
        _log.info("removed what unfinished saves left: %s", ", ".join(unfinished))
    return unfinished


def complete_folders(storage: Storage) -> list[str]:
    """The folders that count and have a COMMIT, whole or not, as `<job>-<step>/<attempt>`, the newest first."""
    counting = read_ownership(storage)
    places = [place for name in folder_names(storage) for place in copies_of(storage, name)]
    return [place for place in places if counting.counts(*place.split("/")) and COMMIT in storage.sizes(place)]


def _remove(storage: Storage, fence: Fence, places: list[str]) -> None:
    for place in places:
        fence.check()
        storage.remove(f"{place}/{COMMIT}")
        storage.remove(place)
        storage.remove_empty(place.partition("/")[0])
