"""Programs that listen on a held port, and who listens on a port."""

import os
import socket
import subprocess
import sys
from contextlib import closing

from pipeline.utils.listeners import listen_on_held, listening_process
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS


def test_a_program_that_knows_nothing_of_holders_listens_on_a_held_port() -> None:
    with closing(hold_port()) as holder:
        port = str(holder.getsockname()[1])
        command = [sys.executable, "-m", "pipeline.roles.held_port", port, "http.server", port, "--bind", "127.0.0.2"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
            try:
                wait_for(
                    "the program to listen", lambda: f"pid {program.pid} " in listening_process(int(port)), WAIT_SECONDS
                )
                with socket.create_connection(("127.0.0.2", int(port)), timeout=30) as link:
                    link.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    assert link.recv(4096).startswith(b"HTTP/1.0 200")
            finally:
                program.kill()


def test_the_process_that_listens_is_named_with_its_user() -> None:
    with closing(hold_port()) as holder:
        port = holder.getsockname()[1]
        assert listening_process(port) == "no process of this machine"
        with listen_on_held("127.0.0.2", port):
            assert listening_process(port).startswith(f"uid {os.getuid()} (")
            assert f"pid {os.getpid()} (" in listening_process(port)
