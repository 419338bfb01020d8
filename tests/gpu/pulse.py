"""What the servers of a run do over time: samples that they work on, tokens that they have made, CPU that they use.

Owns a thread that asks each server below a process for its metrics, twice a second. A server that does not answer is
left out of that look: it is starting, or it ends.
"""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
MEASURES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "tokens",
}


@dataclass
class Pulse:
    """`beats`: one entry a look and server, with the time (seconds since 1970), its endpoint, the `MEASURES`, and under
    `cpu` the seconds that each of its processes has computed since it began, by pid and name."""

    beats: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def pulse(pid: int) -> Iterator[Pulse]:
    """Within the block the servers below process `pid` are asked."""
    taken, over = Pulse(), threading.Event()
    thread = threading.Thread(target=_look, args=(pid, taken, over), daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join(2 * ANSWER_SECONDS)


def _look(pid: int, taken: Pulse, over: threading.Event) -> None:
    while not over.wait(LOOK_SECONDS):
        for endpoint, server in servers_below(pid).items():
            try:
                told = measures_of(endpoint)
            except (OSError, urllib.error.URLError):
                continue
            taken.beats.append({"time": time.time(), "server": endpoint, **told, "cpu": cpu_of(server)})


def tokens_made(endpoint: str) -> float:
    """All that a server has sampled since it started."""
    return measures_of(endpoint)["tokens"]


def measures_of(endpoint: str) -> dict[str, float]:
    """What a server says now. Raises `OSError` if it says nothing."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=ANSWER_SECONDS) as answer:
        return measures(answer.read().decode())


def cpu_of(server: psutil.Process) -> dict[str, float]:
    """Seconds that a server's processes have computed, by pid and the name that each gives itself."""
    found = {}
    for process in (server, *server.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[f"{process.pid} {process.cmdline()[0].rpartition('/')[2]}"] = times.user + times.system
        except (psutil.Error, IndexError):
            continue  # it has just ended
    return found


def servers_below(pid: int) -> dict[str, psutil.Process]:
    """The main process of each vLLM server among the descendants of a process, by `host:port`."""
    found = {}
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if "--host" in words and "--port" in words and any("vllm" in word for word in words):
            found[f"{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"] = child
    return found


def measures(text: str) -> dict[str, float]:
    """The `MEASURES` in a page of metrics in Prometheus' form, summed over its engines."""
    sums = dict.fromkeys(MEASURES.values(), 0.0)
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in MEASURES:
            sums[MEASURES[name]] += float(line.rsplit(" ", 1)[1])
    return sums
