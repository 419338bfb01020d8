"""Runs a program that listens on a held port: `python -m pipeline.roles.held_port PORT MODULE ARGUMENT…`.

For vLLM and torchrun, which would bind the port with SO_REUSEADDR only. The kernel admits no socket next to the holder
of the port except one of the same user with SO_REUSEPORT (`pipeline.utils.subprocesses.hold_port`). Promises that the
program otherwise runs as `python -m MODULE ARGUMENT…` does.
"""

import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipeline.roles import TRAINER
from pipeline.utils.fork_server import VARIABLE
from pipeline.utils.forked_process import ForkedProcess
from pipeline.utils.listeners import listen_on_held
from pipeline.utils.subprocesses import STARTER

_TORCHRUN = "torch.distributed.run"


def listen_on_held_port(port: int) -> None:
    """Make every socket of this process that binds to this port allow SO_REUSEPORT."""
    stock = socket.socket.bind

    def bind(self: socket.socket, address: Any, /) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[1] == port:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stock(self, address)

    socket.socket.bind = bind  # type: ignore[method-assign, assignment]


def create_store_on_held_port(port: int) -> None:
    """Make torchrun's store, which binds in C++, listen on a socket made here, on the master's address only."""
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    rendezvous: Any = static_tcp_rendezvous
    stock = rendezvous.TCPStore

    def store(address: str, at: int, world_size: int, is_master: bool, *arguments: Any, **options: Any) -> Any:
        if is_master and at == port:
            options["master_listen_fd"] = listen_on_held(address, port).detach()
        return stock(address, at, world_size, is_master, *arguments, **options)

    rendezvous.TCPStore = store


def fork_workers(address: str) -> None:
    """Make torchrun fork its workers from the fork server at `address`, which has imported torch already.

    A server that refuses, or that is gone, costs only time: torchrun then starts the worker as ever.
    """
    if not address:
        return
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    handler: Any = SubprocessHandler
    stock = handler._popen

    def popen(self: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        env = {**env, STARTER: str(os.getpid())}  # not torchrun's own starter, which its environment may name
        with suppress(OSError):
            output, error = (file.fileno() if file else n for n, file in ((1, self._stdout), (2, self._stderr)))
            worker = ForkedProcess(address, TRAINER, args, env, (0, output, error))
            if worker.started():
                return worker
        return stock(self, args, env)

    handler._popen = popen


def main(arguments: list[str]) -> None:
    port, module, *rest = arguments
    if module == _TORCHRUN:
        create_store_on_held_port(int(port))
        fork_workers(os.environ.get(VARIABLE, ""))
    else:
        listen_on_held_port(int(port))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
