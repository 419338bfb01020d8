"""The report on a rank's node and roles when its attempt failed, for the post-mortem.

Owns `attempts/<attempt>/nodes/<rank>.txt`. Only this node can read these facts, and they are gone minutes later. The
report is best effort: it takes at most `REPORT_SECONDS`, and a failure costs only the report.
"""

import socket
import time
from collections.abc import Mapping, Sequence

from pipeline.run.paths import AttemptPaths
from pipeline.utils import shared_files
from pipeline.utils.node_facts import describe_node, finish_within

REPORT_SECONDS = 5.0


def report_node(paths: AttemptPaths, rank: int, last_signs: Mapping[str, Sequence[str]]) -> None:
    """Write the report of this rank; `last_signs` are the last signs of life of its roles, by the role's name."""

    def write() -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        signs = "\n".join(f"{role}: {line}" for role, lines in last_signs.items() for line in lines)
        head = f"rank {rank} on {socket.gethostname()}, {now} UTC\n\n## last signs of life\n{signs or 'no roles'}\n"
        shared_files.write_atomic(paths.node_report(rank), f"{head}\n{describe_node(paths.run)}".encode())

    finish_within(REPORT_SECONDS, write)
