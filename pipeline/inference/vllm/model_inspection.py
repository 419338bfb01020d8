"""vLLM looks at a model's class in a fork of the server, not in a new interpreter.

To build its config, vLLM asks a model's class what it supports, in another process, since the import of the class might
initialize CUDA. vLLM starts an interpreter for this, which imports torch and vLLM again: once for each class and cache
folder (`modelinfos`), so at each cold start. A fork has these modules already.
"""

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.errors import DeadlineError

SECONDS = 300.0
"""Deadline of one inspection, which imports the module of a model."""
Inspection = Callable[[], Any]


def inspect_in_forks() -> None:
    """Patch vLLM's registry of models. A process that cannot be forked still starts an interpreter."""
    from vllm.model_executor.models import registry

    stock = getattr(registry, "_run_in_subprocess", None)
    if stock is None or stock.__module__ == __name__:
        return

    def run(inspection: Inspection) -> Any:
        return run_in_fork(inspection) if _may_fork() else stock(inspection)

    registry._run_in_subprocess = run


def run_in_fork(inspection: Inspection) -> Any:
    """The result of `inspection`, called in a fork of this process.

    Raises `RuntimeError` if the call fails, with its traceback, or if its process is killed, and `DeadlineError` after
    `SECONDS`.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(inspection, sender), name="ModelInspection")
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise DeadlineError("the inspection of a model's class", SECONDS)
        result, failure = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the inspection of a model's class ended with exit code {process.exitcode}") from None
    finally:
        process.kill()  # it has nothing left to do
        process.join()
        process.close()  # a closed process is not reported as a killed one (`plugin`)
        receiver.close()
    if failure:
        raise RuntimeError(f"the inspection of a model's class failed:\n{failure}")
    return result


def _send_result(inspection: Inspection, sender: Connection) -> None:
    try:
        sender.send((inspection(), ""))
    except Exception:  # noqa: BLE001 the server gets the traceback
        sender.send((None, traceback.format_exc()))


def _may_fork() -> bool:
    """Whether this process has only Python's threads and no CUDA: a fork breaks thread pools of libraries, and CUDA."""
    import torch

    threads = len(list(Path("/proc/self/task").iterdir()))
    return threads == threading.active_count() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
