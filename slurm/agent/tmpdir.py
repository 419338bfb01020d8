"""Directories for the temporary files and the compiled-code caches of a node's roles.

An inference engine creates sockets and files in the folder for temporary files, torchrun and wandb create folders, and
none of them removes all. On shared nodes these accumulate. So each attempt has its own folder, which is removed at its
end.

Caches of compiled code stay, since they shorten the next start. The libraries execute their content, so a cache is used
only if no other user can write to it. By default torch and CUTLASS use names in /tmp that any user can create first,
and which no other node has; they get a folder in the home directory instead, where the other caches are, and which the
nodes of a cluster share. All of these libraries write to caches that several processes use at once. If other users can
write to the home directory, or nobody can, all caches are in a checked directory in /tmp. With `cluster.compile_cache`,
all caches are below that directory.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.packaged_model import cache_folder
from pipeline.inference.engine_registry import all_engines
from pipeline.utils.private_files import is_safe, make_private

FOLDER, COMPILED = "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"
MAX_PATH = 107 - 40
"""Most characters of a folder's path, so that a socket in it (an id of 36) has a path that the kernel accepts."""
TEMPORARY_CACHES: tuple[str, ...] = (COMPILED, "CUTE_DSL_CACHE_DIR")
"""Variables of caches whose default is in /tmp."""
HOME_CACHES = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR")
"""Variables of caches whose default is in the home directory, in addition to those of the engines."""


def scratch_prefix(attempt: str) -> str:
    """How the names of an attempt's folders for temporary files begin; short, since sockets are in them."""
    return f"rollcall-{hashlib.sha256(attempt.encode()).hexdigest()[:8]}-"


def remove_scratch(attempt: str) -> None:
    """Remove the folders on this machine that killed agents of an attempt left."""
    for outside in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(outside).glob(f"{scratch_prefix(attempt)}*"):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch_folder(
    attempt: str, environment: Mapping[str, str] = os.environ, shared: str = ""
) -> Iterator[dict[str, str]]:
    """Environment variables for the roles of a rank; their `TMPDIR` is removed when the block ends.

    A killed process does not remove it; then `remove_scratch` can. `shared` is `cluster.compile_cache`, the directory
    for the caches of all nodes; empty: the home directory. Variables that the user set keep their values. If the
    folder's path is too long, the engines' sockets are outside of it.
    """
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(attempt), ignore_cleanup_errors=True) as folder:
        yield folder_variables(Path(folder), environment, shared)


def folder_variables(folder: Path, environment: Mapping[str, str], shared: str) -> dict[str, str]:
    """As `scratch_folder`, for a folder that the caller removes."""
    outside = tempfile.gettempdir()
    caches = _shared_caches(Path(shared)) if shared else {}
    caches = caches or _caches(Path(outside), folder)
    if len(str(folder)) > MAX_PATH:
        caches |= {name: outside for engine in all_engines() for name in engine.socket_variables}
    return {FOLDER: str(folder)} | {name: value for name, value in caches.items() if name not in environment}


def _caches(outside: Path, folder: Path) -> dict[str, str]:
    """Variables for the caches whose default is writable by other users.

    They are below this user's folder in the home directory. Without a safe home they are below this user's directory in
    `outside`, or below the attempt's `folder` if another user has that name.
    """
    if (at_home := _home_folder()) is not None:
        return _below(at_home, TEMPORARY_CACHES)
    directory = outside / f"rollcall-cache-{os.getuid()}"
    if not make_private(directory):
        print(
            f"rollcall: {directory} is not private to this user: compiled code is not kept for the next attempt",
            flush=True,
        )
        directory = folder
    # An agent loads the engines, which takes a part of a second, only without a home that can be used.
    return _below(directory, _all_caches())


def _home_folder() -> Path | None:
    """This user's folder for compiled code in the home directory; None if it cannot be used."""
    folder = cache_folder() / "compiled"
    try:
        if not is_safe(Path.home()):
            return None
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder if make_private(folder) and os.access(folder, os.W_OK) else None
    except OSError:  # such as a home that does not exist on this node, or is full
        return None


def _shared_caches(site: Path) -> dict[str, str]:
    """Variables for all caches, below this user's directory in `site`; empty, with a note, if it cannot be used."""
    directory = site / f"rollcall-cache-{os.getuid()}"
    try:
        site.mkdir(parents=True, exist_ok=True)
        problem = "" if make_private(directory) else f"{directory} is not private to this user"
    except OSError as error:
        problem = f"{directory} cannot be made: {error.strerror or error}"
    if problem:
        print(f"rollcall: cluster.compile_cache is not used: {problem}", flush=True)
        return {}
    return _below(directory, _all_caches())


def _all_caches() -> tuple[str, ...]:
    return (*TEMPORARY_CACHES, *HOME_CACHES, *(name for engine in all_engines() for name in engine.cache_variables))


def _below(directory: Path, names: tuple[str, ...]) -> dict[str, str]:
    return {name: str(directory / name.lower()) for name in names}
