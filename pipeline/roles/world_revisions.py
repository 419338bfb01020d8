"""The assignment of an attempt on disk, with its revisions after the losses of nodes.

Owns the names `world.json` and `world-<revision>.json` in the rendezvous directory. A revision is created exclusively,
so of two ranks that replace a node at the same time one fails, and reads the other's. Promises that a world without
spares, which never changes, costs no further read.
"""

from pipeline.run.paths import WORLD, AttemptPaths
from pipeline.topology.plan import World
from pipeline.utils.shared_dir import FileSharedDir, SharedDir


class WorldRevisions:
    """The worlds of one attempt. `OSError` where the disk fails."""

    def __init__(self, paths: AttemptPaths, directory: SharedDir | None = None) -> None:
        """`directory` is the one at `paths.rendezvous`."""
        self._directory = directory or FileSharedDir(paths.rendezvous)
        self._world: World | None = None

    def newest(self) -> World | None:
        """The newest revision that is visible here; None before the first world. Lists the directory at most once."""
        if self._world is None:
            self._world = self._directory.read(WORLD, World)
        if self._world is not None and (self._world.spares or self._world.losses):
            names = self._directory.names()
            while (name := _name(self._world.revision + 1)) in names:
                following = self._directory.read(name, World)
                if following is None:  # not readable yet
                    break
                self._world = following
        return self._world

    def publish(self, world: World) -> bool:
        """Publish a world as the revision after the newest; False if another rank published one."""
        return self._directory.create(_name(world.revision), world)


def _name(revision: int) -> str:
    return f"world-{revision}.json"
