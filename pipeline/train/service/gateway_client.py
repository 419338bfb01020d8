"""The trainer's way to the front.

Owns the connection: where the front is, which it tells in a file, and the form of a turn. Promises that a turn which
was answered is on the front's disk; that one which was not is made again, as often as it takes, while `pulse` is
called; that a front which was started anew, perhaps elsewhere, is found; and that no other program gets its secret.
Must not know what work is."""

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
    """The front is not there, or does not know this trainer: attach, then make the turn again."""


class GatewayClient:
    """One trainer's connection to the front whose folder is `root`."""

    def __init__(self, root: Path, attempt: str, facts: ServerFacts, pulse: Callable[[], None]) -> None:
        self._root, self._attempt, self._facts, self._pulse = root, attempt, facts, pulse
        self._link: http.client.HTTPConnection | None = None
        self._secret = ""
        self._attached = False
        self._silent = False

    def turn(
        self,
        cursors: Callable[[], dict[str, int]],
        done: Sequence[WorkResult],
        committed: dict[str, int] | None,
        seconds: float,
        *,
        ending: bool = False,
    ) -> Work | None:
        """Bring results and take work, if there is any within `seconds` and the trainer is not `ending`. A front that
        does not know this trainer is told `cursors` first: what each model has behind it. `SupersededError` when
        another trainer has come since.
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
            raise _Reattach(f"it does not let the trainer in ({status}): {body[:200]!r}")
        if self._silent:
            log.info("the front is there again")
        self._attached, self._silent = True, False

    def _post(self, route: str, body: bytes) -> tuple[int, bytes]:
        assert self._link is not None
        self._link.request("POST", route, body, {SECRET: self._secret})
        answer = self._link.getresponse()
        read = answer.read()
        if answer.status == 409:
            raise SupersededError("another trainer serves by now: this one changes nothing more")
        return answer.status, read

    def _lose(self, reason: Exception) -> None:
        if not self._silent:
            log.warning("the front is not there, which is asked for again: %s", reason)
        self._silent, self._attached = True, False
        self.close()
