"""What the wandb client needs of a server: runs that are made, resumed and filled, over HTTP on loopback.

with WandbServer() as server:
    wandb ... in an environment with server.variables()
server.history("demo-1f3a")                     # its rows, in order
"""

import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self

HISTORY = "wandb-history.jsonl"


class WandbServer:
    """Serves from its construction to the end of its block."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, dict[int, str]]] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def variables(self) -> dict[str, str]:
        """What makes a client come here."""
        address = f"http://127.0.0.1:{self._http.server_address[1]}"
        return {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}

    def history(self, run: str) -> list[dict[str, Any]]:
        """The rows of a run by their line; a line that was sent twice is there once, as its last sender had it."""
        return [json.loads(line) for _, line in sorted(self.files[run].get(HISTORY, {}).items())]

    def answer(self, path: str, body: bytes) -> Any:
        """What a request gets."""
        if path == "/graphql":
            asked = json.loads(body)
            return {"data": self._query(asked.get("operationName", ""), asked.get("variables", {}))}
        if path.endswith("/file_stream"):
            self._take(path.split("/")[-2], json.loads(body).get("files", {}))
        return {}

    def _query(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        if name == "RunResumeStatus":
            return {"model": {"id": "p", "name": given["project"], "bucket": self._bucket(given["name"])}}
        if name == "UpsertBucket":
            new = given["name"] is not None and given["name"] not in self.files
            if given["name"] is not None:
                self.files.setdefault(given["name"], {})
            return {"upsertBucket": {"bucket": self._bucket(given["name"]), "inserted": new}}
        if name == "CreateRunFiles":
            to = [
                {"name": file, "uploadUrl": f"{self.variables()['WANDB_BASE_URL']}/uploads"} for file in given["files"]
            ]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": to}}
        return {}

    def _bucket(self, run: str | None) -> dict[str, Any] | None:
        if run not in self.files:
            return None
        history = self.history(run)
        project = {"id": "p", "name": "rollcall", "entity": {"id": "e", "name": "lab"}}
        return {
            "id": run,
            "name": run,
            "displayName": run,
            "project": project,
            "config": "{}",
            "tags": [],
            "historyLineCount": len(history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in history[-1:]]),
            "eventsTail": "[]",
            "summaryMetrics": json.dumps(history[-1] if history else {}),
            # A run without it was made and never started; the client would begin it anew.
            "wandbConfig": '{"t": 1}',
        }

    def _take(self, run: str, files: dict[str, Any]) -> None:
        for name, part in files.items():
            lines = self.files.setdefault(run, {}).setdefault(name, {})
            lines |= {part["offset"] + index: line for index, line in enumerate(part["content"])}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_PUT(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = json.dumps(server.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                return

        return Handler
