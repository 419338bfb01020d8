"""What libraries leave in a node's folder for temporary files, in a folder of its own that goes with the attempt.

vLLM makes sockets there and torchrun a folder for logs, and neither removes them; where many share a node they add up.
Compile caches stay where they are: the next attempt starts sooner with them.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SOCKETS, LOGS = "VLLM_RPC_BASE_PATH", "PET_LOG_DIR"
"""vLLM's variable, and torchrun's way to say `--log-dir`."""
LONGEST = 107 - 40
"""Characters of a folder in which a socket's name, an id of 36, fits into what the kernel takes."""


@contextmanager
def scratch_folder(given: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """Variables for the roles of a rank; what they name is removed when the block ends. What is `given` stays."""
    with tempfile.TemporaryDirectory(prefix="rollcall-", ignore_cleanup_errors=True) as folder:
        ours = {LOGS: folder} | ({SOCKETS: folder} if len(folder) <= LONGEST else {})
        yield {name: value for name, value in ours.items() if name not in given}
