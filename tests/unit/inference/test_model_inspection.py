"""What a model's class supports, found out in a fork: results, failures, and a fork that dies or takes too long."""

import os
import signal
import sys
import time
from multiprocessing import process
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from pipeline.errors import DeadlineError
from pipeline.inference.vllm import model_inspection, plugin
from pipeline.inference.vllm.model_inspection import run_in_fork
from pipeline.utils.subprocesses import Child, tail
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.runs.launched import ROOT

REGISTRY = """
from pipeline.inference.vllm import plugin
plugin.register()
from vllm.model_executor.models import registry
registry._SUBPROCESS_COMMAND = ["false"]
print("generates:", registry.ModelRegistry.models["Qwen3ForCausalLM"].inspect_model_cls().is_text_generation_model)
"""
"""Fails if vLLM starts an interpreter for its inspection."""


def test_the_result_comes_from_a_fork() -> None:
    here = {"imported": True}
    pid, found = run_in_fork(lambda: (os.getpid(), here))
    assert (pid != os.getpid(), found) == (True, here)


def test_a_failure_is_reported_with_its_traceback() -> None:
    def fail() -> NoReturn:
        raise ImportError("no module of the model")

    with pytest.raises(RuntimeError, match=r"(?s)in fail.*no module of the model"):
        run_in_fork(fail)


def test_a_fork_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_fork_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_inspection, "SECONDS", 0.2)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(DeadlineError, match="inspection of a model's class"):
        run_in_fork(lambda: time.sleep(WAIT_SECONDS))
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_server_does_not_report_its_forks_as_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process.BaseProcess, "start", process.BaseProcess.start)
    monkeypatch.setattr(plugin, "_started", [])
    plugin.record_children()
    run_in_fork(lambda: None)
    assert len(plugin._started) == 1
    plugin._log_killed_children()
    assert capsys.readouterr().out == ""


def test_a_server_without_a_cache_starts_no_interpreter_for_it(tmp_path: Path) -> None:
    """With the plugin, in the state in which a server asks: its threads and its imports."""
    (tmp_path / "program.py").write_text(REGISTRY)
    variables = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path), "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    asking = Child([sys.executable, str(tmp_path / "program.py")], tmp_path / "log", variables, forks.request())
    try:
        wait_for("the answer", lambda: asking.poll() is not None, WAIT_SECONDS)
    finally:
        asking.kill()
    assert "generates: True" in asking.log.read_text().splitlines(), "\n".join(tail(asking.log))
    assert [*(tmp_path / "modelinfos").iterdir()]
