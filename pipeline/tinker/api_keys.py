"""Who may use the server, and how much of it.

Owns the file of API keys, which holds their hashes alone, and the limits of each. Promises that a key is compared in
constant time, that the file is read again when it changes, and that nobody gets in while it cannot be read: clients
ask again. A key
begins with `tml-`, as the SDK demands.

One line a key, `#` begins a comment:

    <sha256 of the key, hex>  <name>  [models=N]  [bytes=N]
"""

import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.sampling_limits import is_decimal
from pipeline.utils import shared_files

log = logging.getLogger(__name__)
PREFIX = "tml-"
_LIMITS = ("models", "bytes")


@dataclass(frozen=True)
class Owner:
    """Whose a key is: two keys of one name share everything. `models` and `bytes` are what the name may have at once;
    0: what the server has."""

    name: str
    models: int = 0
    bytes: int = 0


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def parse_keys(text: str, where: str) -> dict[str, Owner]:
    """Owners by the digests of their keys; `ConfigError` naming the line that is no key."""
    owners: dict[str, Owner] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            owners[words[0].lower()] = _owner(words, f"{where}, line {number}")
    return owners


def _owner(words: list[str], where: str) -> Owner:
    limits = dict(word.partition("=")[::2] for word in words[2:])
    well_formed = (
        len(words) > 1 and len(words[0]) == 64 and all(letter in "0123456789abcdefABCDEF" for letter in words[0])
    )
    if not well_formed or any(name not in _LIMITS or not is_decimal(value) for name, value in limits.items()):
        expected = "<sha256 of the key> <name> [models=N] [bytes=N]"
        raise ConfigError("serve.keys", where, expected, "printf %s KEY | sha256sum gives the hash")
    return Owner(words[1], **{name: int(value) for name, value in limits.items()})


def _read_keys(path: Path) -> dict[str, Owner]:
    """Owners by the digests of their keys; `OSError` for a file that cannot be read, `ConfigError` for other faults."""
    content = path.read_bytes()
    try:
        return parse_keys(content.decode(), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError("serve.keys", f"{path}, line {line}", "text in UTF-8", "save the file as UTF-8") from None


@dataclass
class Keys:
    """The keys in a file, or one key of this run's own."""

    path: Path | None = None
    own: str = ""
    _owners: dict[str, Owner] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)

    def owner(self, key: str) -> Owner:
        """Whose key this is; `ApiError` 401 if nobody's, 408 while the file cannot be read."""
        hashed = digest(key)
        for known, owner in self._current().items():
            if hmac.compare_digest(known, hashed):
                return owner
        raise ApiError("no such API key: set TINKER_API_KEY to a key of this server", 401)

    def check(self) -> None:
        """`ConfigError` if the file cannot be read, or a line of it."""
        if self.path is not None:
            try:
                _read_keys(self.path)
            except OSError as error:
                raise ConfigError("serve.keys", str(self.path), "a file that can be read", str(error)) from None

    def _current(self) -> dict[str, Owner]:
        if self.path is None:
            return {digest(self.own): Owner("owner")}
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._owners, self._stamp = _read_keys(self.path), stamp
        except (OSError, ConfigError) as error:
            log.error("the file of API keys cannot be read: %s", error)
            raise ApiError("the file of API keys cannot be read just now; ask again", 408) from None
        return self._owners


def own_key(path: Path) -> str:
    """The key of a run that has no file of keys: made once, readable by the run's owner alone."""
    if not path.exists():
        shared_files.create_exclusive(path, new_key().encode())
    return path.read_text()
