"""NVIDIA's Multi-Process Service (MPS) for roles that share GPUs: their kernels run at once, not in turns.

Owns the service's control daemon of a rank. Promises that the daemon answers before a role starts, and that neither it
nor its folder is left when the block ends. Needs no root. Must not know roles.

    with multi_process_service(needs_mps, paths.attempt, paths.logs / "mps.0.log") as variables:
        …start roles with these variables…

Source: NVIDIA, Multi-Process Service, https://docs.nvidia.com/deploy/mps/.
"""

import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from pipeline.errors import DeadlineError, RollcallError
from pipeline.utils import subprocesses
from pipeline.utils.waiting import wait_for
from slurm.agent.preflight import MPS_PROGRAM
from slurm.agent.tmpdir import scratch_prefix

PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
MAX_TMPDIR = 107 - 60
"""Characters of TMPDIR, so that the service's sockets in a folder there have paths that the kernel accepts."""
START_SECONDS = 20.0
ANSWER_SECONDS = 5.0
STOP_SECONDS = 5.0


def share_gpus(gpus: Iterable[Sequence[int]]) -> bool:
    """Whether a GPU is in two of these lists, each of one role."""
    return any(count > 1 for count in Counter(chain.from_iterable(gpus)).values())


@contextmanager
def multi_process_service(
    enabled: bool, attempt: str, log: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[dict[str, str]]:
    """The environment variables by which roles use a service that runs until the block ends; none unless `enabled`.

    The daemon sees all GPUs of the node, so that the numbers in a role's CUDA_VISIBLE_DEVICES stay valid. Its output
    is appended to `log`. Raises `RollcallError` if it ends or does not answer within `START_SECONDS`.
    """
    if not enabled:
        yield {}
        return
    # Where TMPDIR is too long for the paths of sockets, in /tmp.
    outside = tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_TMPDIR else "/tmp"
    prefix = f"{scratch_prefix(attempt)}mps-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=outside, ignore_cleanup_errors=True) as folder:
        variables = {PIPES: folder, LOGS: folder}
        own = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
        daemon = subprocesses.Child([MPS_PROGRAM, "-f"], log, own)
        try:
            _wait_until_ready(daemon, own)
            yield variables
        finally:
            if (code := daemon.poll()) is not None:
                print(f"rollcall: {MPS_PROGRAM} {subprocesses.describe_exit(code)} before its roles; {log}", flush=True)
            _request("quit", own)
            with suppress(DeadlineError):
                wait_for(f"{MPS_PROGRAM} to end", lambda: daemon.poll() is not None, STOP_SECONDS)
            daemon.kill_all()  # its server processes are in other sessions


def _wait_until_ready(daemon: subprocesses.Child, environment: Mapping[str, str]) -> None:
    def ready() -> bool:
        return daemon.poll() is not None or _request("get_server_list", environment)

    try:
        wait_for(f"{MPS_PROGRAM} to answer", ready, START_SECONDS)
        problem = "" if daemon.poll() is None else f"{MPS_PROGRAM} {subprocesses.describe_exit(daemon.poll() or 0)}"
    except DeadlineError as late:
        problem = str(late)
    if problem:
        reason = " ".join(subprocesses.tail(daemon.log, 3)) or "without output"
        raise RollcallError(f"{problem}: {reason}; set resources.mps=false to run without the Multi-Process Service")


def _request(command: str, environment: Mapping[str, str]) -> bool:
    """Send a command to the daemon. Returns whether it answered."""
    with suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(
            [MPS_PROGRAM],
            input=f"{command}\n",
            text=True,
            env=dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ANSWER_SECONDS,
            check=False,
        )
        return answer.returncode == 0
    return False
