"""The HTTP routes of one vLLM server that pause it and change its weights.

Owns the connection during one update, and the translation of everything that can go wrong into `WeightSyncError` with
the server's own words. Promises that no call outlasts its deadline, and that only a server which proves to know the
password is sent it. Knows no order of calls: that is the link's.
"""

import json
import select
from http.client import HTTPConnection, HTTPException
from types import TracebackType
from typing import Any, Self

from pipeline.errors import ImpostorError, WeightSyncError, one_line
from pipeline.utils.authenticated_http import connect
from pipeline.utils.http_errors import error_text
from pipeline.utils.waiting import Deadline

_MIN_SECONDS = 0.001


class ServerUnreachable(WeightSyncError):
    """Nobody listens there: the server's process has ended, or is not there yet."""


class ServerAdminClient:
    """One connection to a server (`host:port`), opened at the first call."""

    def __init__(self, server: str, password: str) -> None:
        self.server, self._route, self._password = server, "", password
        self._headers = {"Authorization": f"Bearer {password}", "Content-Type": "application/json"}
        self._http = HTTPConnection(server)

    def post(self, route: str, deadline: Deadline, **body: Any) -> Any:
        """The server's answer to a POST."""
        self.begin(route, deadline, **body)
        return self.end(deadline)

    def get(self, route: str, deadline: Deadline) -> Any:
        """The server's answer to a GET."""
        self._send("GET", route, deadline, None)
        return self.end(deadline)

    def begin(self, route: str, deadline: Deadline, **body: Any) -> None:
        """Send a POST whose answer `end` takes: between the two, the trainer does its part."""
        self._send("POST", route, deadline, json.dumps(body) if body else None)

    @property
    def answered(self) -> bool:
        """Whether the answer to what was begun is there, or the connection is lost."""
        return self._http.sock is None or bool(select.select([self._http.sock], [], [], 0)[0])

    def end(self, deadline: Deadline) -> Any:
        """The answer to what was begun; `WeightSyncError` when the server did not do it, or the answer is lost or no
        JSON."""
        try:
            self._limit(deadline)
            response = self._http.getresponse()
            text = response.read()
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error
        if response.status != 200:
            self._http.close()  # vLLM closes its end after an error, sometimes without saying so
            raise WeightSyncError(
                f"{self.server}{self._route}: status {response.status}: {error_text(text, response.reason)}"
            )
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise self._lost(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def _send(self, method: str, route: str, deadline: Deadline, body: str | None) -> None:
        self._route = route
        try:
            self._limit(deadline)
            if self._http.sock is None:
                connect(self._http, self._password)
            self._http.request(method, route, body, self._headers)
        except (OSError, HTTPException, ImpostorError) as error:
            raise self._lost(error) from error

    def _limit(self, deadline: Deadline) -> None:
        """Bound the next operation on the socket by what is left."""
        self._http.timeout = max(deadline.left, _MIN_SECONDS)
        if self._http.sock is not None:
            self._http.sock.settimeout(self._http.timeout)

    def _lost(self, error: Exception) -> WeightSyncError:
        self._http.close()
        what = "no answer in time" if isinstance(error, TimeoutError) else one_line(error)
        kind = ServerUnreachable if isinstance(error, ConnectionRefusedError) else WeightSyncError
        return kind(f"{self.server}{self._route}: {what}")


def call_processes(control: ServerAdminClient, method: str, deadline: Deadline, **arguments: str) -> list[list[Any]]:
    """Call a method of `worker_extension.WeightsExtension` in each process of a server; one list of one result each."""
    body = {"method": method, "kwargs": arguments} if arguments else {"method": method}
    return process_results(control, method, control.post("/collective_rpc", deadline, **body))


def process_results(control: ServerAdminClient, method: str, answer: Any) -> list[list[Any]]:
    """The results in the answer to a call of a method in each process."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not all(isinstance(result, list) and len(result) == 1 for result in results):
        raise WeightSyncError(f"{control.server}/collective_rpc {method}: no results in {str(answer)[:100]!r}")
    return results


def count_processes(control: ServerAdminClient, deadline: Deadline) -> int:
    """The number of processes that share the server's model."""
    answer = control.get("/get_world_size", deadline)
    if not isinstance(answer, dict) or not isinstance(answer.get("world_size"), int):
        raise WeightSyncError(f"{control.server}/get_world_size: no world_size in {str(answer)[:100]!r}")
    return int(answer["world_size"])


def raise_failure(control: ServerAdminClient, deadline: Deadline) -> None:
    """`WeightSyncError` with the first reason why a process did not meet this trainer or install an update."""
    for number, (reason,) in enumerate(call_processes(control, "weights_failure", deadline)):
        if reason:
            raise WeightSyncError(f"{control.server}, process {number}: {reason}")
