"""The trainer's connection to the gateway.

Owns the discovery of the gateway's address, from a file, and the format of a turn: one HTTP request that delivers
results and takes work. Promises that an answered turn is on the gateway's disk; that an unanswered one is repeated
without limit, while `pulse` is called; that a restarted gateway is reconnected to, also at another address; and that
no other program receives its secret. Must not know the content of work."""

import http.client
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pipeline.errors import ImpostorError, SupersededError
from pipeline.tinker.gateway_settings import Address, address_file
from pipeline.tinker.tinker_records import Attach, ServerFacts, TrainerTurn, Work, WorkResult, encode
from pipeline.tinker.trainer_routes import ATTACH, SECRET, TURN
from pipeline.utils import shared_files
from pipeline.utils.authenticated_http import connect

log = logging.getLogger(__name__)
TIMEOUT_SECONDS, PAUSE_SECONDS = 30.0, 0.5
_work = msgspec.msgpack.Decoder(Work)


class _Reattach(Exception):
    """The gateway is unreachable, or does not know this trainer: attach, then repeat the turn."""


class GatewayClient:
    """One trainer's connection to the gateway whose folder is `root`."""

    def __init__(self, root: Path, attempt: str, facts: ServerFacts, pulse: Callable[[], None]) -> None:
        self._root, self._attempt, self._facts, self._pulse = root, attempt, facts, pulse
        self._link: http.client.HTTPConnection | None = None
        self._secret = ""
        self._attached = False
        self._warned = False

    def turn(
        self,
        cursors: Callable[[], dict[str, int]],
        done: Sequence[WorkResult],
        committed: dict[str, int] | None,
        seconds: float,
        *,
        ending: bool = False,
    ) -> Work | None:
        """Deliver results and take work; None if none arrives within `seconds`, or if the trainer is `ending`.

        A gateway that does not know this trainer first receives `cursors`: the last completed request of each model.
        Raises `SupersededError` if another trainer has attached since.
        """
        while True:
            try:
                if not self._attached:
                    self._attach(cursors())
                status, body = self._post(
                    TURN, encode(TrainerTurn(self._attempt, tuple(done), committed, seconds, ending))
                )
                if status == 204:
                    return None
                if status == 200:
                    return _work.decode(body)
                raise _Reattach(f"it answered {status}: {body[:200]!r}")
            except (_Reattach, ImpostorError, OSError, http.client.HTTPException) as reason:
                self._lose(reason)
                self._pulse()
                time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _attach(self, cursors: dict[str, int]) -> None:
        address = shared_files.read_document(address_file(self._root), Address)
        if address is None:
            raise _Reattach(f"no address in {address_file(self._root)} yet")
        parts = urlsplit(address.url)
        self._link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
        self._secret = address.secret
        connect(self._link, self._secret)
        status, body = self._post(ATTACH, encode(Attach(self._attempt, cursors, self._facts)))
        if status != 204:
            raise _Reattach(f"it refuses the trainer ({status}): {body[:200]!r}")
        if self._warned:
            log.info("the gateway is reachable again")
        self._attached, self._warned = True, False

    def _post(self, route: str, body: bytes) -> tuple[int, bytes]:
        assert self._link is not None
        self._link.request("POST", route, body, {SECRET: self._secret})
        response = self._link.getresponse()
        content = response.read()
        if response.status == 409:
            raise SupersededError("another trainer serves now: this one changes nothing more")
        return response.status, content

    def _lose(self, reason: Exception) -> None:
        if not self._warned:  # one line per outage; the turn is repeated twice a second
            log.warning("the gateway is unreachable, and is tried again: %s", reason)
        self._warned, self._attached = True, False
        self.close()
