"""What an HTTP server says of an error."""

import pytest

from pipeline.utils.http_errors import MAX_CHARACTERS, error_text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "token 99 is out of vocabulary", "code": 400}}', "token 99 is out of vocabulary"),
        (b'{"error": {"code": 400}}', "{'code': 400}"),
        (b'{"error": "no such thing"}', "no such thing"),
        (b'{"detail": "no error here"}', '{"detail": "no error here"}'),
        (b"[1]", "[1]"),
        (b"Bad \xff gateway", "Bad � gateway"),
        (b"", "Not Found"),
        (b"x" * 1000, "x" * MAX_CHARACTERS),
    ],
)
def test_the_words_are_the_servers_own(body: bytes, words: str) -> None:
    assert error_text(body, "Not Found") == words
