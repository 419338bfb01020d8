"""What the wandb client needs of a server: runs that are made, resumed and filled, over HTTP on loopback.

with WandbServer() as server:
    wandb ... in an environment with server.variables()
server.history("demo-1f3a")                     # its rows, in order
"""

import gzip
import json
from typing import Any

from tests.fakes.http_server import HttpServer, Request

HISTORY = "wandb-history.jsonl"


class WandbServer(HttpServer):
    """Serves from its construction to the end of its block."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, dict[int, str]]] = {}
        super().__init__()

    def variables(self) -> dict[str, str]:
        """What makes a client come here."""
        return {
            "WANDB_BASE_URL": f"http://{self.endpoint}",
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }

    def history(self, run: str) -> list[dict[str, Any]]:
        """The rows of a run by their line; a line that was sent twice is there once, as its last sender had it."""
        return [json.loads(line) for _, line in sorted(self.files[run].get(HISTORY, {}).items())]

    def respond(self, request: Request) -> tuple[int, bytes]:
        zipped = request.headers.get("Content-Encoding") == "gzip"
        body = gzip.decompress(request.body) if zipped else request.body
        return 200, json.dumps(self._answer(request.route, body)).encode()

    def _answer(self, path: str, body: bytes) -> Any:
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
