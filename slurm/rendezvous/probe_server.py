"""The proof that an address reaches a rank, and the questions of other agents to it.

Owns the connect-back: every agent has a probe server that answers requests authenticated with its node record's token,
and the leader connects to each record's addresses until its rank answers. A probe server also connects to another one
for the leader, since an address at which a node reaches itself proves nothing: docker0 has the same address on every
node. After the rendezvous, agents ask the same server questions (`PeerConnection`), whose content it does not know: it
has a function for the answers. Promises that a port that another process took meanwhile does not count as ours; that
only processes with access to the run directory get an answer, or can make a probe server connect; that an answer is of
the asked rank and to this very question; and that any number of unauthenticated connections costs at most `CALLERS`
threads and locks out no peer. Must not know roles.

    leader ──request──► rank 3                          is rank 3 at this address?
    leader ──request (relay)──► rank 3 ──request──► leader   can rank 3 reach the leader at this address?
    rank 50 ──question──► rank 3 ──answer──► rank 50 ──question──► …         a connection with many questions
"""

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import msgspec

from pipeline.topology.plan import NodeInfo
from pipeline.utils.waiting import Deadline

CALLERS = 64
"""Most concurrent connections of a probe server, and most ranks to which the leader connects at once."""
BACKLOG = 1024
"""The listen backlog for bursts of connections; beyond it, the kernel retries only after a second."""
ANSWER_SECONDS = 1.0
NEXT_QUESTION_SECONDS = 10.0
"""Seconds until the next question, after which the server closes a connection."""
MAX_LINE = 4096

Responder = Callable[[str], str | None]
"""Returns the answer to a question in one line, within seconds; None closes the connection without an answer."""


class Forwarded(msgspec.Struct, frozen=True):
    """A request to another probe server, which is forwarded unchanged to `address`:`port`."""

    address: str
    port: int
    request: str


class ProbeRequest(msgspec.Struct, frozen=True):
    """A request for the answer to a nonce or to a question, or for the answer of another probe server."""

    nonce: str
    relay: Forwarded | None = None
    question: str = ""


class ProbeServer:
    """Answers probe requests to this rank until it is closed; usable as a context manager.

    `token` is a secret that only the rank's node record contains; `address` is the interface to listen on, by default
    all; the system chooses `port`; `responder` answers questions, and is called in many threads.
    """

    def __init__(
        self,
        run_id: str,
        attempt: str,
        rank: int,
        address: str = "",
        token: str = "",
        responder: Responder = lambda question: None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._key, self._responder = _key(run_id, attempt, rank, token), responder
        self._callers = _Callers()
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, close all connections and free the port."""
        # On Linux this wakes the thread that is blocked in accept().
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._callers.close_all()

    def __enter__(self) -> "ProbeServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue  # the caller closed the connection before its turn
            except OSError:
                return  # closed
            if self._callers.admit(caller):
                # A thread per caller: a silent caller does not delay the others.
                threading.Thread(target=self._answer, args=(caller,), name="beacon's answer", daemon=True).start()
            else:
                caller.close()

    def _answer(self, caller: socket.socket) -> None:
        with caller:
            try:
                caller.settimeout(ANSWER_SECONDS)
                while (request := _opened(self._key, _line(caller))) is not None:
                    self._callers.authenticate(caller)
                    if (reply := self._reply(request)) is None:
                        return
                    caller.sendall(reply)
                    if not request.question:
                        return
                    caller.settimeout(NEXT_QUESTION_SECONDS)
            except OSError:
                return  # the caller retries, or tries another address
            finally:
                self._callers.leave(caller)

    def _reply(self, request: ProbeRequest) -> bytes | None:
        if request.question:
            answer = self._responder(request.question)
            return None if answer is None else _answer_of(self._key, request.nonce, answer)
        if request.relay is None:
            return _answer_of(self._key, request.nonce)
        relay = request.relay
        return _exchange(relay.address, relay.port, relay.request.encode(), ANSWER_SECONDS)


class _Callers:
    """The open connections, at most `CALLERS`.

    If all slots are taken, the connection that has been silent for longest is closed, since a peer sends its request at
    once. A connection with an authenticated request is never closed before its answer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._silent: dict[socket.socket, None] = {}  # oldest first
        self._authenticated: set[socket.socket] = set()

    def admit(self, caller: socket.socket) -> bool:
        """Add a connection. Returns False if no slot is free within `ANSWER_SECONDS`: all others are being answered."""
        with self._changed:
            if self._full() and self._silent:
                with suppress(OSError):  # already closed
                    next(iter(self._silent)).shutdown(socket.SHUT_RDWR)
            if self._changed.wait_for(lambda: not self._full(), ANSWER_SECONDS):
                self._silent[caller] = None
            return caller in self._silent

    def authenticate(self, caller: socket.socket) -> None:
        """Protect a connection with an authenticated request from being closed."""
        with self._changed:
            self._silent.pop(caller, None)
            self._authenticated.add(caller)

    def leave(self, caller: socket.socket) -> None:
        """Remove a connection; call this before the socket is closed."""
        with self._changed:
            self._silent.pop(caller, None)
            self._authenticated.discard(caller)
            self._changed.notify()

    def close_all(self) -> None:
        """End all connections, so that their peers notice at once."""
        with self._changed:
            for caller in (*self._silent, *self._authenticated):
                with suppress(OSError):  # already closed
                    caller.shutdown(socket.SHUT_RDWR)

    def _full(self) -> bool:
        return len(self._silent) + len(self._authenticated) >= CALLERS


class PeerConnection:
    """Questions to the probe server of one rank, over one connection; usable as a context manager.

    with PeerConnection(run_id, node_info, seconds=1.0) as peer:
        answer = peer.ask("…", seconds=5.0)
    """

    def __init__(self, run_id: str, node_info: NodeInfo, seconds: float = ANSWER_SECONDS) -> None:
        """Connect to the first address of the record within `seconds`; `OSError` if it does not accept."""
        self._key = _key(run_id, node_info.attempt, node_info.rank, node_info.token)
        self._socket = socket.create_connection((node_info.addresses[0], node_info.probe_port), timeout=seconds)

    def ask(self, question: str, seconds: float) -> str:
        """The answer within `seconds`; `OSError` if the rank gives none, or another process answers."""
        nonce = secrets.token_hex(8)
        self._socket.settimeout(seconds)
        self._socket.sendall(_sealed(self._key, ProbeRequest(nonce, question=question)))
        line = _line(self._socket)
        _, _, answer = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(line, _answer_of(self._key, nonce, answer.decode(errors="replace"))):
            raise ConnectionError("no answer of the rank")
        return answer.decode()

    def close(self) -> None:
        """End the connection; a thread that waits in `ask` gets an `OSError`."""
        with suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> "PeerConnection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def find_addresses(
    run_id: str, node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo] = (), seconds: float = ANSWER_SECONDS
) -> Mapping[int, str]:
    """The first address of each node record at which its rank answers within `seconds`, by rank.

    This process connects itself, or through `witnesses`, whose first addresses are verified: an address counts if one
    of them got the answer. A rank that does not answer is absent. Connects to up to `CALLERS` ranks at once.
    """
    if not node_infos:
        return {}
    with ThreadPoolExecutor(min(CALLERS, len(node_infos)), thread_name_prefix="call") as callers:
        addresses = callers.map(partial(_find_address, run_id, witnesses=witnesses, seconds=seconds), node_infos)
        return {node_info.rank: address for node_info, address in zip(node_infos, addresses, strict=True) if address}


@dataclass(frozen=True)
class _Callee:
    """A probe server to connect to, and its key."""

    address: str
    port: int
    key: bytes

    @classmethod
    def of(cls, run_id: str, node_info: NodeInfo, address: str) -> "_Callee":
        return cls(address, node_info.probe_port, _key(run_id, node_info.attempt, node_info.rank, node_info.token))

    def answers(self, seconds: float) -> bool:
        """Whether the expected probe server answers this process."""
        nonce = secrets.token_hex(8)
        answer = _exchange(self.address, self.port, _sealed(self.key, ProbeRequest(nonce)), seconds)
        return hmac.compare_digest(answer, _answer_of(self.key, nonce))

    def answers_to(self, witness: "_Callee", seconds: float) -> bool:
        """Whether the expected probe server answers a witness, which forwards request and answer unchanged."""
        nonce = secrets.token_hex(8)
        relay = Forwarded(self.address, self.port, _sealed(self.key, ProbeRequest(nonce)).decode())
        request = _sealed(witness.key, ProbeRequest(secrets.token_hex(8), relay))
        answer = _exchange(witness.address, witness.port, request, 2 * seconds)
        return hmac.compare_digest(answer, _answer_of(self.key, nonce))


def _find_address(run_id: str, node_info: NodeInfo, witnesses: Sequence[NodeInfo], seconds: float) -> str | None:
    callers = [_Callee.of(run_id, witness, witness.addresses[0]) for witness in witnesses]
    for address in node_info.addresses:
        callee = _Callee.of(run_id, node_info, address)
        if any(callee.answers_to(caller, seconds) for caller in callers) if callers else callee.answers(seconds):
            return address
    return None


def _exchange(address: str, port: int, request: bytes, seconds: float) -> bytes:
    """Send a request and return the line of the answer; empty without an answer."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as call:
            call.sendall(request)
            return _line(call)
    except OSError:
        return b""


def _line(connection: socket.socket) -> bytes:
    """Read one line. Returns the partial line if it ends early or is too long. The socket's timeout bounds the line."""
    received, deadline = b"", Deadline("a line", connection.gettimeout() or ANSWER_SECONDS)
    while not received.endswith(b"\n") and len(received) < MAX_LINE and not deadline.passed:
        connection.settimeout(max(deadline.left, 0.001))
        chunk = connection.recv(MAX_LINE)
        if not chunk:
            break
        received += chunk
    return received


def _key(run_id: str, attempt: str, rank: int, token: str) -> bytes:
    return f"rollcall {run_id} {attempt} {rank} {token}".encode()


def _sealed(key: bytes, request: ProbeRequest) -> bytes:
    """The line of an authenticated request."""
    body = msgspec.json.encode(request)
    return _tag(key, b"ask " + body) + b" " + body + b"\n"


def _opened(key: bytes, line: bytes) -> ProbeRequest | None:
    """The request in a line; None if its authentication fails."""
    tag, _, body = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(tag, _tag(key, b"ask " + body)):
        return None
    return msgspec.json.decode(body, type=ProbeRequest)


def _answer_of(key: bytes, nonce: str, answer: str = "") -> bytes:
    """The line that answers a nonce; the tag covers the answer to a question too."""
    body = f" {answer}" if answer else ""
    return _tag(key, f"answer {nonce}{body}".encode()) + f"{body}\n".encode()


def _tag(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256").hex().encode()
