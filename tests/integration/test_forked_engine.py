"""The server's engine is forked, and shares nothing with the server that could harm either."""

import ctypes
import multiprocessing
import signal
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from pipeline.weights.plugin import fork_engines
from tests.patience import WAIT_SECONDS

# Importing vLLM has torch say what of it is deprecated.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PR_GET_PDEATHSIG = 2


def tell_signals(to: Connection) -> None:
    """What an engine would be killed by when its server ends, and where it would tell signals."""
    at_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(at_death), 0, 0, 0)
    to.send((at_death.value, signal.set_wakeup_fd(-1)))


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where vLLM takes the way to start its engine from; put back afterwards."""
    from vllm.v1.engine import utils

    monkeypatch.setattr(utils, "get_mp_context", utils.get_mp_context)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return utils


def test_an_engine_is_forked_ends_with_its_server_and_tells_it_no_signal(utils: Any) -> None:
    fork_engines()
    ours, theirs = multiprocessing.Pipe()
    loop, waker = socket.socketpair()
    with loop, waker, ours, theirs:
        waker.setblocking(False)
        before = signal.set_wakeup_fd(waker.fileno())
        try:
            engine = utils.get_mp_context().Process(target=tell_signals, args=(theirs,))
            engine.start()
        finally:
            signal.set_wakeup_fd(before)
        assert ours.poll(WAIT_SECONDS)
        assert ours.recv() == (signal.SIGKILL, -1)
        engine.join(WAIT_SECONDS)
        assert engine.exitcode == 0


def test_an_engine_is_started_as_vllm_says_once_cuda_was_used(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_engines()
    fork_engines()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert utils.get_mp_context().get_start_method() == "spawn"
