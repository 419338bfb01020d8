"""The gate before a Unix socket: what passes it, and how soon."""

import asyncio
import socket
import time
from pathlib import Path

from pipeline.utils import mutual_auth
from pipeline.utils.listeners import listen_on_held
from pipeline.utils.socket_gate import Gate

ASKED = 40
"""So often that the kernel has gone over to delayed acknowledgements, of 40 ms."""


def test_the_second_of_two_small_answers_waits_for_no_acknowledgement_of_the_first(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def answer_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b"one")
            await asyncio.sleep(0.002)  # so that the gate passes on two pieces
            writer.write(b"two")
        writer.close()
        await writer.wait_closed()
        ended.set()

    def ask(port: int) -> list[float]:
        """Seconds until both answers are there, each time."""
        seconds = []
        with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
            mutual_auth.introduce(link, "secret", "a test")
            for _ in range(ASKED):
                began, received = time.perf_counter(), 0
                link.sendall(b"what is it?")
                while received < len(b"onetwo"):
                    received += len(link.recv(64))
                seconds.append(time.perf_counter() - began)
        return seconds

    async def run() -> list[float]:
        server = await asyncio.start_unix_server(answer_twice, str(tmp_path / "server"))
        listening = listen_on_held("127.0.0.1", 0)
        gate = asyncio.create_task(Gate(str(tmp_path / "server"), "secret", "a test").serve(listening))
        async with server:
            seconds = await asyncio.to_thread(ask, listening.getsockname()[1])
            await asyncio.wait_for(ended.wait(), 30)
            gate.cancel()
            await asyncio.gather(gate, return_exceptions=True)
        return seconds

    seconds = asyncio.run(run())
    assert min(seconds[ASKED // 2 :]) < 0.03, "each waits for a delayed acknowledgement"
