"""Mutual proof that two peers know the same secret, which is never sent (HMAC challenge and response).

A peer without the secret is recognized before it receives a password or a record. A proof is valid for one nonce, one
service and one direction. A handshake takes no longer than the socket's timeout. The connection itself is not
encrypted: an attacker who can modify packets can still take it over afterwards.

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
"""Time limit of a handshake."""


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: str, claim: str, nonces: bytes) -> bytes:
    """The 32-byte answer to these nonces that requires the secret. `claim` names the peer's role and service."""
    key = hmac.digest(secret.encode(), b"proof of " + claim.encode(), "sha256")
    return hmac.digest(key, nonces, "sha256")


def is_proof(received: bytes, secret: str, claim: str, nonces: bytes) -> bool:
    return hmac.compare_digest(received, proof(secret, claim, nonces))


def introduce(link: socket.socket, secret: str, service: str) -> None:
    """The client's part, on a new connection to `service`.

    `ImpostorError` for a server that does not know the secret; `OSError` if its answer is incomplete.
    """
    nonce = new_nonce()
    link.sendall(nonce)
    answer = _receive(link, NONCE_BYTES + PROOF_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    if not is_proof(answer[NONCE_BYTES:], secret, f"server {service}", nonces):
        raise impostor_error(*link.getpeername()[:2])
    link.sendall(proof(secret, f"client {service}", nonces))


def welcome_answer(secret: str, service: str, nonce: bytes) -> tuple[bytes, bytes]:
    """The server's part: its answer to a client's nonce, and the proof that it must receive from the client next."""
    nonces = nonce + new_nonce()
    answer = nonces[NONCE_BYTES:] + proof(secret, f"server {service}", nonces)
    return answer, proof(secret, f"client {service}", nonces)


def impostor_error(address: str, port: int, answered: str = "") -> ImpostorError:
    """The error for a server that does not know the secret, with the process that listens on its port, if local."""
    answer = f"; it answered {answered}" if answered else ""
    return ImpostorError(
        f"the program that listens at {address}:{port} does not know this attempt's secret, so nothing was sent to it"
        f"{answer}; on this machine, {listening_process(port)} listens on this port"
    )


def _receive(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionError(f"the connection was closed after {len(data)} of {size} bytes of a handshake")
        data += part
    return data
