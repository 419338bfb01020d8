"""What libraries leave in a node's folder for temporary files, in a folder of its own that goes with the attempt.

vLLM makes sockets and files there, torchrun and wandb folders, and none of them removes all; where many share a node
they add up. What torch has compiled stays where it is: the next attempt starts sooner with it.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FOLDER, SOCKETS, COMPILED = "TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR"
LONGEST = 107 - 40
"""Characters of a folder in which a socket's name, an id of 36, fits into what the kernel takes."""


@contextmanager
def scratch_folder(given: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """Variables for the roles of a rank; their `TMPDIR` is removed when the block ends.

    In a folder with a long name vLLM's sockets stay outside of it.
    """
    outside = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="rollcall-", ignore_cleanup_errors=True) as folder:
        kept = {COMPILED: str(Path(outside) / f"torchinductor_{os.getuid()}")}
        if len(folder) > LONGEST:
            kept[SOCKETS] = outside
        yield {FOLDER: folder} | {name: value for name, value in kept.items() if name not in given}
