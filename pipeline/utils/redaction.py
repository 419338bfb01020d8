"""Removal of secrets from text that leaves the machine, such as an archive for a bug report.

Owns what counts as a secret: values that are known to be secret, credentials in URLs, values of names such as
`HF_TOKEN`, `api_key` or `password`, and tokens of a known form (`hf_…`, `ghp_…`, private keys). A value without such a
name or form is kept unless it is known, so pass every secret that is at hand. Where a name is ambiguous (`pad_token`),
its value is removed too.

    redactor = Redactor([world.secret, *local_secrets()])
    redactor.redact("HF_TOKEN=abc at https://me:abc@host")       # "HF_TOKEN=[removed] at https://[removed]@host"
"""

import netrc
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

REMOVED = "[removed]"
MIN_LENGTH = 6
"""Characters of a known value that is searched for. Ordinary words contain shorter values."""
SECRET_FILES = (".aws/credentials", ".cache/huggingface/token", ".config/wandb/settings", ".git-credentials")
"""Files of the home directory, in addition to `.netrc`, in which tools keep secrets."""

_NAME = (
    r"(?:[\w.-]*(?:token|secret|passwd|password|passphrase|pwd|credential|credentials|authorization|signature|cookie"
    r"|(?:api|access|private|secret|encryption|account)[_-]?key)|(?:[\w.-]*[_.-])?key|sig)"
)
# A quoted value may be cut off at the end of its line.
_VALUE = (
    r"(?:\\+[\"'][^\"'\n]*(?:[\"']|$)|\"(?:[^\"\\\n]|\\.)*(?:\"|$)|'(?:[^'\\\n]|\\.)*(?:'|$)|\[[^\]\n]*\]?|(?:bearer|basic|token)\s+[^\s\"',;]+"
    r"|[^\s,;&'\"\])}\[{]+)"
)
_FLAGS = re.IGNORECASE | re.MULTILINE
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# Each word is tried once, from its start, so the time is linear in the number of words.
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}\\?[\"']?\s*(?:=>|[:=])\s*){_VALUE}", _FLAGS)
_OPTION = re.compile(rf"(?<![\w-])(--{_NAME}\s+){_VALUE}", _FLAGS)
_URL = re.compile(r"(?<![\w+.-])([a-z][\w+.-]*://)[^\s/'\"<>]*@", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?:^[\w+/=]+\n)+-----END [A-Z ]*PRIVATE KEY-----",
    re.MULTILINE,
)
_TOKEN = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|tml-[\w-]{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|wandb_\w{32,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
)


class Redactor:
    """Removes secrets from text; `known` are values that are removed wherever they occur."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        # Longest first: a value that contains another one is removed as a whole.
        values = sorted({value for value in known if len(value) >= MIN_LENGTH}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, values))) if values else None

    def redact(self, text: str) -> str:
        """The text with `REMOVED` in the place of each secret."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        text = _PRIVATE_KEY.sub(REMOVED, text)
        text = _URL.sub(rf"\1{REMOVED}@", text)
        for assigned in (_ASSIGNED, _OPTION):
            text = assigned.sub(rf"\1{REMOVED}", text)
        text = _BEARER.sub(rf"\1 {REMOVED}", text)
        return _TOKEN.sub(REMOVED, text)


def local_secrets(variables: Mapping[str, str] = os.environ, home: Path | None = None) -> Iterator[str]:
    """The secrets of this user at hand: variables with a secret's name, `.netrc`, and files of `SECRET_FILES`."""
    yield from (value for name, value in variables.items() if _SECRET_NAME.fullmatch(name))
    home = home or Path(variables.get("HOME", "/nonexistent"))
    with suppress(OSError, netrc.NetrcParseError):
        for _, _, password in netrc.netrc(str(home / ".netrc")).hosts.values():
            yield password or ""
    for name in SECRET_FILES:
        with suppress(OSError, UnicodeDecodeError):
            text = (home / name).read_text()
            yield text.strip()
            yield from (match[0].partition("=")[2].strip(" '\"") for match in _ASSIGNED.finditer(text))
            yield from re.findall(r"://[^\s/:@]*:([^\s/@]+)@", text)
