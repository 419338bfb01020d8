"""Proof that an address leads to a rank.

Owns the connect-back: every agent answers connections that know its card's token, and the leader calls each card's
addresses until one answers as its rank would. A beacon also calls another one for the leader, since the addresses at
which a node reaches itself prove nothing: docker0 has the same one on every node. Promises that a port that somebody
else took meanwhile is not mistaken for ours; that nobody outside of the run directory can make a beacon call; and that
strangers, however many connect, cost it no more than `CALLERS` threads and keep no peer out. Knows no roles.

    leader ──request──► rank 3                          is rank 3 at this address?
    leader ──request (relay)──► rank 3 ──request──► leader   can rank 3 reach the leader at this address?
"""

import hmac
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import msgspec

from pipeline.topology.plan import NodeInfo
from pipeline.utils.waiting import Deadline

CALLERS = 64
"""Most callers that a beacon answers at a time, and most ranks that the leader calls at once."""
BACKLOG = 1024
"""Callers that connect in a burst wait in this backlog; beyond it, the kernel retries only after a second."""
ANSWER_SECONDS = 1.0
MAX_LINE = 4096


class Forwarded(msgspec.Struct, frozen=True):
    """A request for another beacon, to be passed on to `address`:`port` as it is."""

    address: str
    port: int
    request: str


class ProbeRequest(msgspec.Struct, frozen=True):
    """What a caller asks: an answer for this nonce, or what another beacon answers."""

    nonce: str
    relay: Forwarded | None = None


class ProbeServer:
    """Answers connections to this rank until it is closed; usable as a context manager.

    `token` is what only the rank's card tells; `address` is the interface to listen on, all of them by default; `port`
    is chosen by the system.
    """

    def __init__(self, run_id: str, attempt: str, rank: int, address: str = "", token: str = "") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._key = _key(run_id, attempt, rank, token)
        self._callers = _Callers()
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        # On Linux this wakes the thread that waits in accept().
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> "ProbeServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue  # the caller went away before its turn
            except OSError:
                return  # closed
            if self._callers.admit(caller):
                # A caller that says nothing keeps nobody else waiting.
                threading.Thread(target=self._answer, args=(caller,), name="beacon's answer", daemon=True).start()
            else:
                caller.close()

    def _answer(self, caller: socket.socket) -> None:
        with caller:
            try:
                caller.settimeout(ANSWER_SECONDS)
                request = _opened(self._key, _line(caller))
                if request is not None:
                    self._callers.heard(caller)
                    caller.sendall(self._reply(request))
            except OSError:
                return  # the caller asks again, or asks another address
            finally:
                self._callers.leave(caller)

    def _reply(self, request: ProbeRequest) -> bytes:
        if request.relay is None:
            return _answer_of(self._key, request.nonce)
        relay = request.relay
        return _exchange(relay.address, relay.port, relay.request.encode(), ANSWER_SECONDS)


class _Callers:
    """Those who are connected, at most `CALLERS`.

    Where there is no room for one more, that one is hung up on which has been silent for longest: a peer speaks as soon
    as it is connected. One whose request was heard, so who knows the key, has its answer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._silent: dict[socket.socket, None] = {}  # the oldest first
        self._heard: set[socket.socket] = set()

    def admit(self, caller: socket.socket) -> bool:
        """Count one more in; False if there is no room within `ANSWER_SECONDS`, as all others are being answered."""
        with self._changed:
            if self._full() and self._silent:
                with suppress(OSError):  # gone already
                    next(iter(self._silent)).shutdown(socket.SHUT_RDWR)
            if self._changed.wait_for(lambda: not self._full(), ANSWER_SECONDS):
                self._silent[caller] = None
            return caller in self._silent

    def heard(self, caller: socket.socket) -> None:
        """It is answered now."""
        with self._changed:
            self._silent.pop(caller)
            self._heard.add(caller)

    def leave(self, caller: socket.socket) -> None:
        """To be called before it is closed."""
        with self._changed:
            self._silent.pop(caller, None)
            self._heard.discard(caller)
            self._changed.notify()

    def _full(self) -> bool:
        return len(self._silent) + len(self._heard) >= CALLERS


def find_addresses(
    run_id: str, cards: Sequence[NodeInfo], witnesses: Sequence[NodeInfo] = (), seconds: float = ANSWER_SECONDS
) -> Mapping[int, str]:
    """For each card the first of its addresses where its rank answers within `seconds`; by rank.

    This process calls itself, or has the `witnesses` call, whose first addresses are known to be right: an address
    counts when one of them got the answer. A rank that answers nowhere is absent. Calls up to `CALLERS` ranks at once.
    """
    if not cards:
        return {}
    with ThreadPoolExecutor(min(CALLERS, len(cards)), thread_name_prefix="call") as callers:
        found = callers.map(partial(_find_address, run_id, witnesses=witnesses, seconds=seconds), cards)
        return {card.rank: address for card, address in zip(cards, found, strict=True) if address}


@dataclass(frozen=True)
class _Callee:
    """A beacon that is called, and its key."""

    address: str
    port: int
    key: bytes

    @classmethod
    def of(cls, run_id: str, card: NodeInfo, address: str) -> "_Callee":
        return cls(address, card.probe_port, _key(run_id, card.attempt, card.rank, card.token))

    def answers(self, seconds: float) -> bool:
        """Whether the right beacon answers this process."""
        nonce = secrets.token_hex(8)
        told = _exchange(self.address, self.port, _sealed(self.key, ProbeRequest(nonce)), seconds)
        return hmac.compare_digest(told, _answer_of(self.key, nonce))

    def answers_to(self, witness: "_Callee", seconds: float) -> bool:
        """Whether it answers a witness, which passes request and answer on as they are."""
        nonce = secrets.token_hex(8)
        relay = Forwarded(self.address, self.port, _sealed(self.key, ProbeRequest(nonce)).decode())
        request = _sealed(witness.key, ProbeRequest(secrets.token_hex(8), relay))
        told = _exchange(witness.address, witness.port, request, 2 * seconds)
        return hmac.compare_digest(told, _answer_of(self.key, nonce))


def _find_address(run_id: str, card: NodeInfo, witnesses: Sequence[NodeInfo], seconds: float) -> str | None:
    callers = [_Callee.of(run_id, witness, witness.addresses[0]) for witness in witnesses]
    for address in card.addresses:
        callee = _Callee.of(run_id, card, address)
        if any(callee.answers_to(caller, seconds) for caller in callers) if callers else callee.answers(seconds):
            return address
    return None


def _exchange(address: str, port: int, request: bytes, seconds: float) -> bytes:
    """The line that is answered there; empty if none is."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as call:
            call.sendall(request)
            return _line(call)
    except OSError:
        return b""


def _line(connection: socket.socket) -> bytes:
    """One line; what came, if it does not end or is too long. The socket's time-out is that of the whole line."""
    found, deadline = b"", Deadline("a line", connection.gettimeout() or ANSWER_SECONDS)
    while not found.endswith(b"\n") and len(found) < MAX_LINE and not deadline.passed:
        connection.settimeout(max(deadline.left, 0.001))
        part = connection.recv(MAX_LINE)
        if not part:
            break
        found += part
    return found


def _key(run_id: str, attempt: str, rank: int, token: str) -> bytes:
    return f"rollcall {run_id} {attempt} {rank} {token}".encode()


def _sealed(key: bytes, request: ProbeRequest) -> bytes:
    """The line that asks."""
    body = msgspec.json.encode(request)
    return _tag(key, b"ask " + body) + b" " + body + b"\n"


def _opened(key: bytes, line: bytes) -> ProbeRequest | None:
    """What a line asks; None for one that does not know the key."""
    tag, _, body = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(tag, _tag(key, b"ask " + body)):
        return None
    return msgspec.json.decode(body, type=ProbeRequest)


def _answer_of(key: bytes, nonce: str) -> bytes:
    return _tag(key, b"answer " + nonce.encode()) + b"\n"


def _tag(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256").hex().encode()
