"""The vLLM plugin of Rollcall, which every vLLM process calls before anything else.

A second call changes nothing, and the module imports without vLLM. With the plugin, vLLM's engine processes never
outlive their server (vLLM leaves them behind if the server is killed), and the scheduler's signals stay blocked in all
processes of vLLM.
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
"""The names of our weight-transfer engines in vLLM. vLLM's engine `nccl` is another one, which needs a pause."""
_ENGINE_CLASSES = {
    "rollcall_gloo": ("pipeline.inference.vllm.gloo_engine", "GlooEngine"),
    "rollcall_nccl": ("pipeline.inference.vllm.nccl_engine", "NcclEngine"),
}
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_ENGINE = "EngineCore"
"""The prefix of vLLM's names for engine processes."""
_server_objects: list[object] = []
"""Objects of the server that a forked process must keep alive without using them."""
_started: list[process.BaseProcess] = []
"""The processes that this process has started with `multiprocessing`."""
CHILD_SECONDS = 4.0
"""Time limit for children to end. Equals vLLM's own limit for its workers."""


def register() -> None:
    """Register the weight-transfer engines and apply all patches in this vLLM process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipeline.inference.vllm.base_requests import skip_tokens_without_adapter
    from pipeline.inference.vllm.compact_logprobs import add_compact_logprobs
    from pipeline.inference.vllm.draft_weights import load_drafting_model
    from pipeline.inference.vllm.kv_cache_size import limit_to_share
    from pipeline.inference.vllm.model_inspection import inspect_in_forks
    from pipeline.inference.vllm.request_times import add_request_times
    from pipeline.inference.vllm.routing_capture import return_routed_experts
    from pipeline.inference.vllm.token_versions import note_versions
    from pipeline.inference.vllm.vllm_compat import add_float32_head, expand_sampling_settings

    if multiprocessing.parent_process() is not None:  # started by the server or an engine, not the server itself
        exit_with_parent()
    else:
        heartbeat.obey_exits()
        add_request_times()  # its API processes are forked, and have it too
    heartbeat.show_stacks()
    start_resource_tracker()
    for name, (module, engine) in _ENGINE_CLASSES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
    add_float32_head()
    expand_sampling_settings()
    load_drafting_model()
    add_compact_logprobs()
    note_versions()
    skip_tokens_without_adapter()
    limit_to_share()
    return_routed_experts()
    end_children_in_time()
    fork_processes()
    inspect_in_forks()


def fork_processes() -> None:
    """Patch the server to fork its engine and API processes, so that they inherit its imports.

    vLLM's command line and its CPU platform choose `spawn`, because a fork breaks CUDA and OpenMP after their first
    use. A server has used neither when it starts these processes. If vLLM nevertheless detects a reason against a fork,
    its choice applies to the engine. API processes use neither CUDA nor OpenMP.
    """
    from vllm.v1 import utils as apis
    from vllm.v1.engine import utils as engines

    stock = getattr(engines, "get_mp_context", None)
    if stock is None or stock.__module__ == __name__:
        return

    def get_mp_context() -> BaseContext:
        configured = os.environ.get(_METHOD, "")
        os.environ[_METHOD] = "fork"
        try:
            context: BaseContext = stock()
        finally:
            os.environ[_METHOD] = configured or "spawn"  # for the processes that an engine starts
        return context

    util.register_after_fork(fork_processes, _leave_parent)
    engines.get_mp_context = get_mp_context
    forking = {"get_context": lambda method: multiprocessing.get_context("fork")}
    apis.multiprocessing = SimpleNamespace(**vars(multiprocessing) | forking)


def end_children_in_time() -> None:
    """At its exit, this process interrupts its children and kills those that still run after `CHILD_SECONDS`.

    Python's default sends TERM, which is blocked in processes of a role, and waits without a limit. Without this patch,
    an engine that failed to start (for example, out of memory) waited for its workers on GPUs, and its server for the
    engine.
    """
    record_children()
    util.Finalize(None, _end_children, exitpriority=0)


def record_children() -> None:
    """Record the processes that this process starts from now on. Python forgets those that have ended."""
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
            os.kill(child.pid, signal.SIGINT)  # not reaped yet, so the id cannot be another process's
    deadline = Deadline("children of a vLLM process", CHILD_SECONDS)
    for child in children:
        child.join(deadline.left)
        if child.is_alive():
            child.kill()


def _log_killed_children() -> None:
    """Print killed children in torchrun's format: vLLM exits with 0 and without a reason if its engine is killed."""
    for child in _started:
        with suppress(ValueError):  # a closed process has ended in order
            if child.exitcode is not None and child.exitcode < 0:
                number = signal.Signals(-child.exitcode)
                print(f"{child.name}: Signal {number.value} ({number.name}) received by PID {child.pid}", flush=True)


def _leave_parent(_: object) -> None:
    """Detach a forked process from its server: its children, its signal wake-up, its port and its metrics.

    The forked process is killed when the server ends.
    """
    _started.clear()
    end_children_in_time()  # a fork drops the finalizers of its parent
    exit_with_parent()
    signal.set_wakeup_fd(-1)
    from prometheus_client import values
    from vllm.v1.metrics import prometheus

    if multiprocessing.current_process().name.startswith(_ENGINE):
        _release_port()
    # The directory is removed with its last reference. Only the server may do so, so a reference stays here.
    _server_objects.append(prometheus._prometheus_multiproc_dir)
    prometheus._prometheus_multiproc_dir = None
    # The class was chosen at the import, before vLLM had set up metrics for several processes.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def _release_port() -> None:
    """Close the server's socket in an engine process, which does not use it.

    With this socket, an engine would hold the port after its server's end. In addition, an ending server looks for
    other processes on its port, and fails if such a process is just ending too.
    """
    with Path(os.devnull).open() as devnull:
        for entry in list(Path("/proc/self/fd").iterdir()):
            descriptor = int(entry.name)
            if _waits_for_clients(descriptor):
                os.dup2(devnull.fileno(), descriptor)  # the number stays in use, since its owner may still close it


def _waits_for_clients(descriptor: int) -> bool:
    """Whether a descriptor is a bound, unconnected TCP socket. vLLM listens on it only after its engine has started."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as same:
            if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
                return False
            return bool(same.getsockname()[1]) and not _is_connected(same)
    except OSError:  # the descriptor of the directory listing, closed by now
        return False


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
