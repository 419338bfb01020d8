"""Where the roles of a node keep temporary files and what their libraries compile.

vLLM makes sockets and files in the folder for temporary files, torchrun and wandb folders, and none of them removes
all; where many share a node they add up. So each attempt has a folder of its own, which goes with it.

Caches of compiled code stay, since the next attempt starts sooner with them. The libraries load them as code: a cache
is used only if no other user can write to it. torch and CUTLASS would put theirs in /tmp under a name that anybody can
take first; they get a directory that is checked, and so do the caches of a home directory that others can write to.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.utils.private_files import is_safe, make_private

FOLDER, SOCKETS, COMPILED = "TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR"
MAX_PATH = 107 - 40
"""Characters of a folder in which a socket's name, an id of 36, fits into what the kernel takes."""
TEMPORARY_CACHES = (COMPILED, "CUTE_DSL_CACHE_DIR")
"""Variables of caches that are in /tmp unless they are set."""
HOME_CACHES = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR")
"""Variables of caches that are in the home directory unless they are set."""


@contextmanager
def scratch_folder(given: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """Variables for the roles of a rank; their `TMPDIR` is removed when the block ends.

    Variables that the user set keep their values. In a folder with a long name vLLM's sockets stay outside of it.
    """
    outside = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="rollcall-", ignore_cleanup_errors=True) as folder:
        kept = _caches(Path(outside), Path(folder))
        if len(folder) > MAX_PATH:
            kept[SOCKETS] = outside
        yield {FOLDER: folder} | {name: value for name, value in kept.items() if name not in given}


def _caches(outside: Path, folder: Path) -> dict[str, str]:
    """The caches that would be where others can write: below a directory of this user in `outside`, or below `folder`,
    which goes with the attempt, if that one is another user's."""
    place = outside / f"rollcall-cache-{os.getuid()}"
    if not make_private(place):
        print(f"rollcall: {place} is not this user's alone: compiled code is not kept for the next attempt", flush=True)
        place = folder
    names = TEMPORARY_CACHES if is_safe(Path.home()) else (*TEMPORARY_CACHES, *HOME_CACHES)
    return {name: str(place / name.lower()) for name in names}
