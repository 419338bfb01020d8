"""A fork server for all tests of a session: roles that they start, and runs, need not import torch and vLLM again.

The process that reports starts it, and its workers find it in their environment. It imports with its first request.
Without it, as in a test that is started by hand from another program, everything starts with exec, and each run starts
its own server.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from pipeline.inference.engine_protocol import SERVER
from pipeline.roles.preloads import stages_of
from pipeline.utils import fork_server
from pipeline.utils.fork_server import Stage
from pipeline.utils.forked_process import ForkRequest, ForkServer
from tests.fakes.configs import make_config

VARIABLE = "ROLLCALL_TESTS_FORK_SERVER"
FOLDER = Path(__file__).with_name("preloaded")
PRELOADED = ("vllm_processes",)
"""Modules of the folder that the server imports after vLLM's."""
_SERVER_PID = "ROLLCALL_TESTS_FORK_SERVER_PID"


def start_server() -> ForkServer:
    """Start the session's server, which imports nothing until it is asked for a process. It has a run's stages."""
    *stages, last = stages_of(make_config())
    last = replace(last, modules=(*last.modules, *PRELOADED))
    server = ForkServer.start([Stage("none", ()), *stages, last], 0, os.environ | {"PYTHONPATH": str(FOLDER)})
    os.environ |= {VARIABLE: server.address, _SERVER_PID: str(server.pid)}
    return server


def request(stage: str = SERVER, *, nests: bool = False) -> ForkRequest | None:
    """How to ask the session's server for a role, which `nests` as a trainer does; None without a server."""
    return ForkRequest.of(os.environ.get(VARIABLE, ""), stage, nests=nests)


def of_runs() -> dict[str, str]:
    """Variables of a launcher whose run shares the session's server; empty without one."""
    address = os.environ.get(VARIABLE, "")
    return {fork_server.VARIABLE: address} if address else {}


def processes_of(run: Path) -> set[psutil.Process]:
    """What the session's server has forked for a run: the processes that write to a file of its directory, all below
    them, and their keepers."""
    parents = {process: _parent(process) for process in _below_server()}
    processes = {process.pid: process for process in parents}
    writers = {process for process in parents if _output(process).is_relative_to(run.resolve())}
    found = {process for process in parents if writers & {process, *_ancestors(process, parents, processes)}}
    return found | {processes[parents[writer]] for writer in writers if parents[writer] in processes}


def _below_server() -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess, KeyError):  # there is none
        return psutil.Process(int(os.environ[_SERVER_PID])).children(recursive=True)
    return []


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return process.ppid()
    return 0


def _ancestors(
    process: psutil.Process, parents: Mapping[psutil.Process, int], processes: Mapping[int, psutil.Process]
) -> Iterator[psutil.Process]:
    while (parent := processes.get(parents[process])) is not None:
        yield parent
        process = parent


def _output(process: psutil.Process) -> Path:
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{process.pid}/fd/1").readlink()
    return Path()
