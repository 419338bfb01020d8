"""A network between a client and Redis that loses answers on request."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CuttingProxy:
    """Forwards one address; after `lose_next_answer`, the next request is delivered and its connection cut instead."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lose = threading.Event()
        self._links: list[socket.socket] = []
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_answer(self) -> None:
        self._lose.set()

    def close(self) -> None:
        for link in [self._listener, *self._links]:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other side closed it first
            finally:
                link.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(self._target)
            self._links += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                server.sendall(data)
        except OSError:
            return  # cut

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                if self._lose.is_set():
                    self._lose.clear()
                    self.lost += 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
        except OSError:
            return  # cut


@contextmanager
def a_cutting_proxy(address: str, port: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy((address, port))
    try:
        yield proxy
    finally:
        proxy.close()
