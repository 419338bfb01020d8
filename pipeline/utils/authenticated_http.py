"""HTTP connections to servers that have proved to know a secret.

Owns the route by which a server proves itself, and the client's part for `http.client` (`connector` has it for
aiohttp). Promises that a new connection carries nothing but a nonce until its server has answered with a proof for this
nonce and for the address that was called, so that neither a key nor a prompt reaches another program.

    GET /rollcall/proof?nonce=…   →   200, the proof in hexadecimal digits
"""

from http.client import HTTPConnection

from pipeline.utils.mutual_auth import NONCE_BYTES, impostor_error, is_proof, new_nonce, proof

ROUTE = "/rollcall/proof"
MAX_ANSWER = 1 << 14


def proof_answer(secret: str, host: str, port: int, query: bytes) -> bytes | None:
    """The body that a server at `host`:`port` answers to this query of `ROUTE`; None for a query without a nonce."""
    try:
        nonce = bytes.fromhex(query.decode().removeprefix("nonce="))
    except ValueError:
        return None
    return proof(secret, _claim(host, port), nonce).hex().encode() if len(nonce) == NONCE_BYTES else None


def connect(link: HTTPConnection, secret: str) -> None:
    """Open the connection and have its server prove itself; `ImpostorError` when it does not know the secret."""
    link.auto_open = 0  # one that was lost is opened here again, and not by `http.client`, which asks for no proof
    link.connect()
    try:
        nonce = new_nonce()
        link.request("GET", f"{ROUTE}?nonce={nonce.hex()}")
        host, port = link.sock.getpeername()[:2]
        answer = link.getresponse()
        check_answer(secret, host, port, nonce, answer.status, answer.reason, answer.read(MAX_ANSWER))
    except BaseException:
        link.close()
        raise


def check_answer(secret: str, host: str, port: int, nonce: bytes, status: int, reason: str, body: bytes) -> None:
    """`ImpostorError` unless this is the proof for a nonce, as the server at `host`:`port` gives it."""
    try:
        given = bytes.fromhex(body.decode())
    except ValueError:
        given = b""
    if status != 200 or not is_proof(given, secret, _claim(host, port), nonce):
        raise impostor_error(host, port, f"status {status} {reason}")


def _claim(host: str, port: int) -> str:
    return f"http server {host}:{port}"
