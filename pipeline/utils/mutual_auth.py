"""Mutual proof that two peers know the same secret, which itself is not sent.

Owns the challenge and its answers. Promises that a peer which does not know the secret is recognized before it gets a
password or a record; that a proof holds for one nonce, one service and one direction; and that a handshake takes no
longer than the socket's timeout. Somebody who can change what travels can still take over a connection afterwards.

    client  ── nonce ──►  server            two sides of a plain connection (`introduce`, `welcome_answer`)
    client  ◄── nonce, proof of the server
    client  ── proof of the client ──►
"""

import hmac
import secrets
import socket

from pipeline.errors import ImpostorError
from pipeline.utils.listeners import listening_process

NONCE_BYTES, PROOF_BYTES = 16, 32
HANDSHAKE_SECONDS = 5.0
"""For a peer's whole part of a handshake."""


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: str, claim: str, nonces: bytes) -> bytes:
    """What only a peer with the secret can answer to these nonces; `claim` says what it claims to be."""
    own = hmac.digest(secret.encode(), b"proof of " + claim.encode(), "sha256")
    return hmac.digest(own, nonces, "sha256")


def is_proof(given: bytes, secret: str, claim: str, nonces: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, claim, nonces))


def introduce(link: socket.socket, secret: str, service: str) -> None:
    """The client's part, on a new connection to `service`.

    `ImpostorError` for a server that does not know the secret; `OSError` when it gives no whole answer.
    """
    nonce = new_nonce()
    link.sendall(nonce)
    answer = _receive(link, NONCE_BYTES + PROOF_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    if not is_proof(answer[NONCE_BYTES:], secret, f"server {service}", nonces):
        raise impostor_error(*link.getpeername()[:2])
    link.sendall(proof(secret, f"client {service}", nonces))


def welcome_answer(secret: str, service: str, nonce: bytes) -> tuple[bytes, bytes]:
    """The server's part: its answer to a client's nonce, and the proof that the client must send then."""
    nonces = nonce + new_nonce()
    answer = nonces[NONCE_BYTES:] + proof(secret, f"server {service}", nonces)
    return answer, proof(secret, f"client {service}", nonces)


def impostor_error(address: str, port: int, answered: str = "") -> ImpostorError:
    """The error for a server that does not know the secret, with what this machine knows about it."""
    what = f"; it answered {answered}" if answered else ""
    return ImpostorError(
        f"the program that listens at {address}:{port} does not know this attempt's secret, so nothing was sent to it"
        f"{what}; on this machine, {listening_process(port)} listens on this port"
    )


def _receive(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = link.recv(size - len(found))
        if not part:
            raise ConnectionError(f"the connection was closed after {len(found)} of {size} bytes of a handshake")
        found += part
    return found
