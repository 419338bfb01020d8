"""The vLLM plugin of Rollcall: called in every vLLM process before it does anything else.

Promises that a second call changes nothing, that importing it costs nothing without vLLM, and that vLLM's engine
processes never outlive the server that started them (vLLM leaves them behind when the server is killed), and that no
process of vLLM hears the scheduler's signals.
"""

import multiprocessing
import os
import signal
import socket
import stat
from contextlib import suppress
from multiprocessing import process, util
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace

from pipeline.utils import heartbeat
from pipeline.utils.subprocesses import exit_with_parent, start_resource_tracker
from pipeline.utils.waiting import Deadline

ENGINES = {"gloo": "rollcall_gloo", "nccl": "rollcall_nccl"}
"""What vLLM calls our weight-transfer engines; it has an `nccl` of its own, which needs a pause."""
_PLACES = {
    "rollcall_gloo": ("pipeline.inference.vllm.gloo_engine", "GlooEngine"),
    "rollcall_nccl": ("pipeline.inference.vllm.nccl_engine", "NcclEngine"),
}
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_ENGINE = "EngineCore"
"""How vLLM's names for an engine's process begin."""
_of_server: list[object] = []
"""What a forked process holds of its server's, and leaves alone."""
_started: list[process.BaseProcess] = []
"""What this process started, by `multiprocessing`."""
CHILD_SECONDS = 4.0
"""As long as vLLM itself waits for its workers."""
MODEL = "policy"
"""What every request asks a server for: the model that it serves, or the adapter on it."""


def register() -> None:
    """Make `ENGINES` weight-transfer engines of this vLLM process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipeline.inference.vllm.base_requests import skip_tokens_without_adapter
    from pipeline.inference.vllm.compact_logprobs import add_compact_logprobs
    from pipeline.inference.vllm.kv_cache_size import limit_to_share
    from pipeline.inference.vllm.token_versions import note_versions
    from pipeline.inference.vllm.vllm_compat import add_float32_head

    if multiprocessing.parent_process() is not None:
        exit_with_parent()
    heartbeat.show_stacks()
    start_resource_tracker()
    for name, (module, engine) in _PLACES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
    add_float32_head()
    add_compact_logprobs()
    note_versions()
    skip_tokens_without_adapter()
    limit_to_share()
    end_children_in_time()
    fork_processes()


def fork_processes() -> None:
    """Have the server fork its engine and its API processes, which then need not import what it has imported.

    vLLM's command line and its CPU platform choose `spawn`, as a fork breaks CUDA and OpenMP where they were used
    before. A server has used neither when it starts these processes. Where vLLM finds a reason against a fork all the
    same, its engine is started as vLLM says. API processes use neither.
    """
    from vllm.v1 import utils as apis
    from vllm.v1.engine import utils as engines

    stock = getattr(engines, "get_mp_context", None)
    if stock is None or stock.__module__ == __name__:
        return

    def get_mp_context() -> BaseContext:
        said = os.environ.get(_METHOD, "")
        os.environ[_METHOD] = "fork"
        try:
            context: BaseContext = stock()
        finally:
            os.environ[_METHOD] = said or "spawn"  # for what an engine starts
        return context

    util.register_after_fork(fork_processes, _leave_parent)
    engines.get_mp_context = get_mp_context
    forking = {"get_context": lambda method: multiprocessing.get_context("fork")}
    apis.multiprocessing = SimpleNamespace(**vars(multiprocessing) | forking)


def end_children_in_time() -> None:
    """Have this process, when it ends, interrupt what it started, and kill what has not ended `CHILD_SECONDS` later.

    By itself Python sends TERM, which no process of a role hears, and waits without an end: an engine that failed to
    start, as for want of memory, waited for its workers on GPUs, and its server for the engine.
    """
    record_children()
    util.Finalize(None, _end_children, exitpriority=0)


def record_children() -> None:
    """Remember what this process starts from now on: Python forgets those that have ended."""
    stock = process.BaseProcess.start
    if stock.__module__ == __name__:
        return

    def start(self: process.BaseProcess) -> None:
        stock(self)
        _started.append(self)

    process.BaseProcess.start = start  # type: ignore[method-assign]


def _end_children() -> None:
    _log_killed_children()
    children = multiprocessing.active_children()
    for child in children:
        if child.pid is not None:
            os.kill(child.pid, signal.SIGINT)  # not reaped yet, so the id is its own
    late = Deadline("children of a vLLM process", CHILD_SECONDS)
    for child in children:
        child.join(late.left)
        if child.is_alive():
            child.kill()


def _log_killed_children() -> None:
    """Say it, as torchrun does of its ranks: vLLM ends with 0 when its engine is killed, and does not say why."""
    for child in _started:
        with suppress(ValueError):  # closed, so it ended in order
            if child.exitcode is not None and child.exitcode < 0:
                number = signal.Signals(-child.exitcode)
                print(f"{child.name}: Signal {number.value} ({number.name}) received by PID {child.pid}", flush=True)


def _leave_parent(_: object) -> None:
    """In a forked process: end with the server, tell no signal to its event loop, and count for oneself."""
    _started.clear()
    end_children_in_time()  # what the server had registered was its own
    exit_with_parent()
    signal.set_wakeup_fd(-1)
    from prometheus_client import values
    from vllm.v1.metrics import prometheus

    if multiprocessing.current_process().name.startswith(_ENGINE):
        _release_port()
    # The server's to remove; kept, since it goes with its last reference.
    _of_server.append(prometheus._prometheus_multiproc_dir)
    prometheus._prometheus_multiproc_dir = None
    # Chosen at its import, when vLLM had not said yet that there are several processes.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def _release_port() -> None:
    """Close the server's socket, of which an engine has no use.

    With it an engine holds the port beyond its server's end. And a server that ends looks for who else has its port,
    and fails if that is just ending too.
    """
    with Path(os.devnull).open() as nothing:
        for each in list(Path("/proc/self/fd").iterdir()):
            if _waits_for_clients(int(each.name)):
                os.dup2(nothing.fileno(), int(each.name))  # the number stays taken: whoever has it may close it


def _waits_for_clients(descriptor: int) -> bool:
    """Whether it is a socket with a port and no other end: vLLM listens only once its engine is there."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as same:
            if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
                return False
            return bool(same.getsockname()[1]) and not _is_connected(same)
    except OSError:  # the one by which the folder was read
        return False


def _is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True
