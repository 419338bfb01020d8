"""The processes of one vLLM server, for tests: the fork server of their session imports this after vLLM.

They wait for each other without spinning. By default a process polls its queue for a second after each message before
it sleeps. On two cores, which other tests need, that is a core for each process of a server with traffic. A message
wakes a sleeping process at once.

With the variable `ROLLCALL_TESTS_FORK_WORKERS`, an engine forks its workers too. By default they are started with exec,
and import vLLM again. An engine on CPUs has not computed anything before.
"""

import multiprocessing
import os
from multiprocessing.context import BaseContext

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor import multiproc_executor

_stock = multiproc_executor.get_mp_context


def get_mp_context() -> BaseContext:
    return multiprocessing.get_context("fork") if "ROLLCALL_TESTS_FORK_WORKERS" in os.environ else _stock()


SpinCondition.__init__.__defaults__ = (0.001,)
multiproc_executor.get_mp_context = get_mp_context
