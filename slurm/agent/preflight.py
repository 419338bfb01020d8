"""A rank's check of its node before the rendezvous.

Owns the content of a node record that the rank reads from its node: identity, GPUs, memory, and problems. Promises
sentences, not exceptions: a node with problems still publishes its record, so that the leader can choose a spare node
and name the reason. Reads no environment variable; the caller passes the scheduler's values.
"""

import errno
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient

PROBE_SECONDS = 20.0
MPS_PROGRAM = "nvidia-cuda-mps-control"
"""The control program of NVIDIA's Multi-Process Service, a part of the driver."""
MIB, GIB = 1 << 20, 1 << 30

FILES_PER_EPISODE = 4
"""Open files of the actor for an episode of an agent service: its endpoint, the connection to the service, the agent's
connection to the endpoint, and the connection to the inference server."""

BUSY_FRACTION = 0.1
"""Fraction of a GPU's memory above which the GPU counts as held by another process."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of this node; memory in bytes. If unknown, memory is 0 and `uuid` and `name` are empty."""

    index: int
    uuid: str = ""
    name: str = ""
    used: int = 0
    total: int = 0

    @property
    def held(self) -> str:
        """A sentence if another process holds the GPU's memory; empty if none does, or if that is unknown."""
        return f"another process holds {self.used / GIB:.1f} GiB of GPU {self.index}" if self._is_busy else ""

    @property
    def _is_busy(self) -> bool:
        return self.used > BUSY_FRACTION * self.total


class NodeRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """The minimum that a node must have.

    Attributes:
        disk, memory: free bytes.
        free_gpus: whether the run uses GPUs, so that GPUs held by other processes are a problem. The number that a rank
            needs depends on its roles: `pipeline.topology.assignment` counts them.
        mps: whether roles share its GPUs through the Multi-Process Service.
    """

    disk: int = 1 * GIB
    memory: int = 1 * GIB
    free_gpus: bool = False
    mps: bool = False


def preflight(folder: Path, gpus: Sequence[Gpu], needs: NodeRequirements) -> tuple[str, ...]:
    """The problems of this node, one sentence each; empty for a fit node. `folder` is the run directory."""
    return (*_disk_problems(folder, needs), *_memory_problems(needs), *_gpu_problems(gpus, needs))


def open_files_warning(episodes: int, limit: int | None = None) -> str:
    """A sentence if the hard limit of open files (`limit`, by default this process's) is too low for an actor with so
    many episodes of an agent in flight; else empty. Other tasks need one file an episode, so the node is still fit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    needed = FILES_PER_EPISODE * episodes
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return ""
    return (
        f"a process may open {hard} files (ulimit -Hn), and {episodes} episodes of an agent in flight need about "
        f"{needed}: raise the limit, or lower rollout.concurrency"
    )


def find_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that this job may use, by index.

    `visible` is CUDA_VISIBLE_DEVICES as the scheduler or the user set it (indices or UUIDs); None if it is not set.
    Without a working nvidia-smi, its indices are returned unchecked.
    """
    listed = None if visible is None else _words(visible)
    gpus = [_parse_gpu(line) for line in _nvidia_smi().splitlines() if line.count(",") >= 4]
    if gpus:
        return tuple(gpu for gpu in gpus if listed is None or _is_listed(gpu, listed))
    return tuple(Gpu(index=int(word)) for word in listed or () if word.isdecimal())


def parts_of_gpus(visible: str | None) -> str:
    """A sentence if CUDA_VISIBLE_DEVICES names parts of GPUs (MIG), which `find_gpus` skips; else empty."""
    parts = [word for word in _words(visible or "") if word.startswith("MIG-")]
    return f"CUDA_VISIBLE_DEVICES names parts of GPUs ({', '.join(parts)}); a role needs whole ones" if parts else ""


def _words(visible: str) -> list[str]:
    return [word.strip() for word in visible.split(",") if word.strip()]


def free_memory() -> int:
    """Bytes of memory that new processes can take on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def node_id() -> str:
    """The identity of this node on a network: the boot id of the machine, and the network namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"


def _disk_problems(folder: Path, needs: NodeRequirements) -> list[str]:
    probe = folder / f".preflight.{socket.gethostname()}.{os.getpid()}"

    def free_bytes() -> int | OSError:
        try:
            shared_files.write_atomic(probe, b"")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return error  # a later write may wait for room, but no attempt begins without any
            raise
        probe.unlink(missing_ok=True)
        return shutil.disk_usage(folder).free

    try:
        # A file server that fails over makes no node unfit: its problem would end an attempt without spare nodes.
        free = retry_transient("the run directory to take a file", free_bytes, FINAL_WRITE_TIMEOUT)
    except OSError as error:
        free = error
    if isinstance(free, OSError):
        hint = "; df and df -i show its free bytes and files" if free.errno == errno.ENOSPC else ""
        return [f"cannot write in {folder}: {free.strerror}{hint}"]
    return [f"{folder} has {free / GIB:.1f} GiB left, {needs.disk / GIB:.1f} are needed"] if free < needs.disk else []


def _memory_problems(needs: NodeRequirements) -> list[str]:
    free = free_memory()
    return [f"{free / GIB:.1f} GiB of memory free, {needs.memory / GIB:.1f} are needed"] if free < needs.memory else []


def _gpu_problems(gpus: Sequence[Gpu], needs: NodeRequirements) -> list[str]:
    problems = [gpu.held for gpu in gpus if needs.free_gpus and gpu.held]
    if needs.mps and gpus and shutil.which(MPS_PROGRAM) is None:
        problems.append(f"{MPS_PROGRAM} of NVIDIA's driver is not on PATH: add its folder, or set resources.mps=false")
    return problems


def _nvidia_smi() -> str:
    """One line per GPU, `index, uuid, name, used MiB, total MiB`; empty without a working nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _parse_gpu(line: str) -> Gpu:
    index, uuid, name, used, total = (part.strip() for part in line.split(",", 4))
    return Gpu(index=int(index), uuid=uuid, name=name, used=_bytes(used), total=_bytes(total))


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * MIB if mebibytes.isdecimal() else 0


def _is_listed(gpu: Gpu, listed: Sequence[str]) -> bool:
    return any(word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)) for word in listed)
