"""HTTP connections to servers that have proved knowledge of a secret.

Defines the route of the proof, and the client's part for `http.client` (`authenticated_connector` has aiohttp's). A new
connection carries only a nonce until its server has answered with a proof for this nonce and this address. So neither a
key nor a prompt reaches another program.

    GET /rollcall/proof?nonce=…   →   200, the proof in hexadecimal digits
"""

from http.client import HTTPConnection

from pipeline.utils.mutual_auth import NONCE_BYTES, impostor_error, is_proof, new_nonce, proof

ROUTE = "/rollcall/proof"
MAX_ANSWER = 1 << 14


def proof_answer(secret: str, host: str, port: int, query: bytes) -> bytes | None:
    """The response body of a server at `host`:`port` to this query of `ROUTE`; None for a query without a nonce."""
    try:
        nonce = bytes.fromhex(query.decode().removeprefix("nonce="))
    except ValueError:
        return None
    return proof(secret, _claim(host, port), nonce).hex().encode() if len(nonce) == NONCE_BYTES else None


def connect(link: HTTPConnection, secret: str) -> None:
    """Open the connection and verify its server's proof. `ImpostorError` if the server does not know the secret."""
    link.auto_open = 0  # `http.client` would reopen a lost connection without a proof
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
    """Raise `ImpostorError` unless the response is the proof of the server at `host`:`port` for this nonce."""
    try:
        received = bytes.fromhex(body.decode())
    except ValueError:
        received = b""
    if status != 200 or not is_proof(received, secret, _claim(host, port), nonce):
        raise impostor_error(host, port, f"status {status} {reason}")


def _claim(host: str, port: int) -> str:
    return f"http server {host}:{port}"
