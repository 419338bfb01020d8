"""A server forks its engine and API processes, which share nothing with it that could harm either."""

import ctypes
import inspect
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.inference.vllm import plugin
from slurm.agent import oom
from tests.patience import WAIT_SECONDS

# Importing vLLM has torch say what of it is deprecated.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PR_GET_PDEATHSIG = 2


def tell(to: Connection) -> None:
    """What kills the process when its server ends, where it would tell signals, whether its metrics are shared, and the
    folder of metrics that it would clear."""
    from prometheus_client import values
    from vllm.v1.metrics import prometheus

    at_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(at_death), 0, 0, 0)
    to.send(
        (
            at_death.value,
            signal.set_wakeup_fd(-1),
            values.ValueClass is not values.MutexValue,
            prometheus._prometheus_multiproc_dir,
        )
    )


def listens(to: Connection, port: int) -> None:
    """Whether the process does, at that port, once it is told to look."""
    assert to.poll(WAIT_SECONDS)
    sockets = psutil.Process().net_connections("inet")
    to.send(any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets))


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Where vLLM takes the ways to start its engine and its API processes from; put back afterwards."""
    from vllm.v1 import utils as apis
    from vllm.v1.engine import utils as engines
    from vllm.v1.metrics import prometheus

    shared = tempfile.TemporaryDirectory(dir=tmp_path)
    monkeypatch.setattr(prometheus, "_prometheus_multiproc_dir", shared)
    monkeypatch.setattr(engines, "get_mp_context", engines.get_mp_context)
    monkeypatch.setattr(apis, "multiprocessing", apis.multiprocessing)
    monkeypatch.setattr(util, "_afterfork_registry", util._afterfork_registry.copy())
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", shared.name)
    yield engines, apis
    shared.cleanup()


@pytest.mark.parametrize(("name", "wanted"), [("EngineCore", False), ("EngineCore_DP1", False), ("ApiServer_0", True)])
def test_an_engine_does_not_hold_the_port_of_its_server(utils: tuple[Any, Any], name: str, wanted: bool) -> None:
    engines, _ = utils
    plugin.fork_processes()
    ours, theirs = multiprocessing.Pipe()
    with socket.socket() as server, ours, theirs:
        server.bind(("127.0.0.1", 0))
        target = (theirs, server.getsockname()[1])
        process = engines.get_mp_context().Process(target=listens, args=target, name=name)
        process.start()
        server.listen()  # as vLLM does, once its engine is there
        ours.send("look")
        assert ours.poll(WAIT_SECONDS)
        assert ours.recv() is wanted
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0


@pytest.mark.parametrize("kind", ["engine", "api"])
def test_a_forked_process_ends_with_its_server_tells_it_no_signal_and_counts_for_itself(
    utils: tuple[Any, Any], kind: str
) -> None:
    engines, apis = utils
    plugin.fork_processes()
    context = engines.get_mp_context() if kind == "engine" else apis.multiprocessing.get_context("spawn")
    ours, theirs = multiprocessing.Pipe()
    loop, waker = socket.socketpair()
    with loop, waker, ours, theirs:
        waker.setblocking(False)
        before = signal.set_wakeup_fd(waker.fileno())
        try:
            process = context.Process(target=tell, args=(theirs,))
            process.start()
        finally:
            signal.set_wakeup_fd(before)
        assert ours.poll(WAIT_SECONDS)
        assert ours.recv() == (signal.SIGKILL, -1, True, None)
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0
        assert Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).is_dir()


def fail_beside_a_worker(to: Connection, deaf: set[signal.Signals]) -> None:
    def work() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
        to.send(os.getpid())
        time.sleep(WAIT_SECONDS)

    worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    worker.start()
    assert to.poll(WAIT_SECONDS)  # somebody has read the pid and answered
    raise MemoryError


@pytest.mark.parametrize(
    ("deaf", "seconds"),
    [({signal.SIGTERM}, WAIT_SECONDS), ({signal.SIGTERM, signal.SIGINT}, 0.2)],
    ids=["that hears what roles hear", "that hears nothing"],
)
def test_an_engine_that_failed_ends_with_its_worker(
    utils: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, deaf: set[signal.Signals], seconds: float
) -> None:
    engines, _ = utils
    monkeypatch.setattr(plugin, "CHILD_SECONDS", seconds)
    plugin.fork_processes()
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        engine = engines.get_mp_context().Process(target=fail_beside_a_worker, args=(theirs, deaf))
        engine.start()
        try:
            assert ours.poll(WAIT_SECONDS)
            worker = psutil.Process(ours.recv())
            ours.send("go on")
            engine.join(WAIT_SECONDS / 2)
            assert engine.exitcode == 1
            worker.wait(WAIT_SECONDS / 2)
        finally:
            engine.kill()  # its worker goes with it


def lose_an_engine() -> None:
    """As vLLM does: it starts an engine, which is killed, waits for it, and ends well."""
    plugin.end_children_in_time()
    engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(WAIT_SECONDS,), name="EngineCore")
    engine.start()
    os.kill(engine.pid or 0, signal.SIGKILL)
    engine.join()
    multiprocessing.active_children()


def test_a_server_whose_engine_was_killed_says_so_when_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """Its exit code is 0; the agent says of what the engine may have died (`slurm.agent.oom`)."""
    server = multiprocessing.get_context("fork").Process(target=lose_an_engine)
    server.start()
    server.join(WAIT_SECONDS)
    assert server.exitcode == 0
    assert oom._KILLED.search(capfd.readouterr().out)


def test_an_engine_is_started_as_vllm_says_once_cuda_was_used(
    utils: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, _ = utils
    plugin.fork_processes()
    plugin.fork_processes()
    monkeypatch.setattr("vllm.utils.system_utils.cuda_is_initialized", lambda: True)
    assert engines.get_mp_context().get_start_method() == "spawn"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_vllms_workers_know_by_these_names_what_a_shared_gpu_leaves_them() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    source = inspect.getsource(Worker)
    for name in ("self.requested_memory", "self.model_runner.model_memory_usage", "self.cache_config.kv_cache_memory"):
        assert name in source
