"""The error text of an HTTP response."""

import json

MAX_CHARACTERS = 300


def error_text(body: bytes, default: str = "") -> str:
    """The server's message: `error.message` or `error` of a JSON object, else the body, or `default` if it is empty.

    >>> error_text(b'{"error": {"message": "token 99 is out of vocabulary", "code": 400}}')
    'token 99 is out of vocabulary'
    """
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text[:MAX_CHARACTERS] or default
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_CHARACTERS]
