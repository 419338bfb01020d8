"""What fakes of HTTP servers share: a server on loopback, of which one method answers every request.

class Echo(HttpServer):
    def respond(self, request: Request) -> tuple[int, bytes]:
        return 200, request.body

with Echo("127.0.0.2") as server:
    ... ask server.endpoint
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self

from pipeline.utils.authenticated_http import ROUTE, proof_answer

PASSWORD = "s3cret"
"""That fakes of servers prove to know."""


@dataclass(frozen=True)
class Request:
    """A request of any method; `route` is its path without what follows a question mark."""

    route: str
    headers: Mapping[str, str]
    body: bytes


class HttpServer:
    """Serves from the end of its construction to the end of its block; `endpoint` is its `host:port`."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._http = ThreadingHTTPServer((address, 0), self._handler())
        self.endpoint = f"{address}:{self._http.server_address[1]}"
        self._thread = Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def respond(self, request: Request) -> tuple[int, bytes]:
        """Status and body of the answer; called in a thread of the request's connection."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                route, _, query = self.path.partition("?")
                if route == ROUTE:
                    host, port = self.request.getsockname()
                    status, answer = 200, proof_answer(PASSWORD, host, port, query.encode()) or b""
                else:
                    status, answer = server.respond(Request(route, self.headers, body))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                try:
                    self.wfile.write(answer)
                except OSError:  # whoever asked is gone
                    self.close_connection = True

            do_GET = do_PUT = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                return

        return Handler
