"""The state of this node for a post-mortem: memory, disks, GPUs, and the kernel's messages about failures.

Owns which facts are collected and how each is bounded. Promises text and no exception: a fact that this user may not
read, or that takes too long, is replaced by the reason.
"""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

COMMAND_SECONDS = 4.0
KERNEL_LINES = 60
KERNEL_LOG = Path("/dev/kmsg")
_TELLING = re.compile(
    r"out of memory|oom[-_ ]|killed process|NVRM|Xid|nvidia|mce:|hardware error|I/O error|EXT4-fs|XFS|nfs:|lustre"
    r"|link (?:is )?down|segfault|hung_task|blocked for more than|soft lockup|no space",
    re.IGNORECASE,
)
_MAX_RECORDS = 100_000


def finish_within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of `work`, or None if it takes longer, or raises. The thread of an unfinished work is abandoned.

    For work that must neither delay nor change the end of its process, such as a post-mortem on a disk that hangs.
    """
    results: list[T] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 (the end of the process stands, whatever this work raises)
            print(f"warning: no post-mortem: {type(error).__name__}: {error}", flush=True)

    thread = threading.Thread(target=run, name="post-mortem", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def describe_node(folder: Path) -> str:
    """The facts of this node as text, with a heading for each; `folder` names the disk of the run."""
    facts: dict[str, Callable[[], str]] = {
        "system": lambda: " ".join(os.uname()),
        "load": lambda: Path("/proc/loadavg").read_text(),
        "memory": _memory,
        "control group": _group_memory,
        f"disk of {folder}": lambda: _disk(folder),
        "disk of /tmp": lambda: _disk(Path("/tmp")),
        "GPUs (nvidia-smi)": lambda: _command("nvidia-smi"),
        f"kernel log, lines about failures (at most {KERNEL_LINES})": kernel_messages,
    }
    return "\n".join(f"## {name}\n{_fact(fact).strip()}\n" for name, fact in facts.items())


def kernel_messages(log: Path = KERNEL_LOG) -> str:
    """The last lines of the kernel's log about memory, GPUs, disks and networks; the seconds are since boot."""
    descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)  # each read is one record, and none blocks
    lines: list[str] = []
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(descriptor, 1 << 13)
            except BrokenPipeError:  # the record was overwritten meanwhile
                continue
            if not record:
                break
            head, _, message = record.decode(errors="replace").partition(";")
            if _TELLING.search(message):
                lines.append(f"[{int(head.split(',')[2]) / 1e6:.1f}] {message.partition(chr(10))[0]}")
    except BlockingIOError:
        pass  # the end of the log
    finally:
        os.close(descriptor)
    return "\n".join(lines[-KERNEL_LINES:]) or "none"


def _fact(read: Callable[[], str]) -> str:
    try:
        return read()
    except (OSError, ValueError, IndexError) as error:
        return f"not readable: {error}"


def _memory() -> str:
    fields = ("MemTotal", "MemAvailable", "SwapFree", "Shmem:", "Committed_AS")
    lines = Path("/proc/meminfo").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith(fields))


def _group_memory() -> str:
    """The memory limits and events of this process's control group (version 2)."""
    group = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    folder = Path("/sys/fs/cgroup") / group.removeprefix("0::").lstrip("/")
    names = ("memory.max", "memory.current", "memory.peak", "memory.events")
    limits = [f"{name}: {' '.join((folder / name).read_text().split())}" for name in names if (folder / name).exists()]
    return "\n".join(limits) or "no memory controller"


def _disk(folder: Path) -> str:
    usage, nodes = shutil.disk_usage(folder), os.statvfs(folder)
    share = usage.free / usage.total if usage.total else 0.0
    return f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB free ({share:.0%}), {nodes.f_favail} inodes"


def _command(*command: str) -> str:
    """The output of a command, which is abandoned after `COMMAND_SECONDS`: nvidia-smi hangs with a lost GPU."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        return f"no {command[0]} here"
    try:
        output, _ = process.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # not awaited: a process that waits for a lost GPU in the kernel does not end
        return f"{command[0]} did not answer within {COMMAND_SECONDS:g} s"
    return output
