"""Names that clients see, and the folders behind them.

Owns the ids of models, samplers and requests, which are derived from a client's request, so that a retry means the same
thing; and the form of `tinker://` paths. Promises that no path leads out of the store: a name is one plain word, and a
folder is made of checked words alone. Pure.

    tinker://<model id>/weights/<name>              state to train on from
    tinker://<model id>/sampler_weights/<name>      an adapter to sample with
    tinker://<model id>/external_weights/<name>     an adapter to take away
"""

import re
import secrets
from dataclasses import dataclass
from typing import Literal, cast

from pipeline.tinker.api_errors import ApiError

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_NUMBER = 10**9 - 1
"""The largest number of a model or a sampling client within its session, and of a model's request. Clients count from
0; the gateway's own request to unload a model has a larger number."""
_MODEL = re.compile(rf"[0-9a-f]{{32}}:train:[0-9]{{1,{len(str(MAX_NUMBER))}}}")
_SCHEME = "tinker://"


def new_session_id() -> str:
    return secrets.token_hex(16)


def model_id(session: str, number: int) -> str:
    return f"{session}:train:{number}"


def sampler_id(session: str, number: int) -> str:
    return f"{session}:sample:{number}"


def session_of(id: str) -> str:
    """The session of a model or a sampler."""
    return id.partition(":")[0]


def request_id(owner: str, number: int) -> str:
    """The id of the request with this number of a model or a sampler."""
    return f"{owner}:{number}"


def unload_id(model: str) -> str:
    """The id of the request to unload a model."""
    return f"{model}:unload"


@dataclass(frozen=True)
class WeightsPath:
    """What a `tinker://` path names."""

    model: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def checkpoint(self) -> str:
        """The kind and the name, such as `weights/0001`."""
        return f"{self.kind}/{self.name}"

    def folder(self, version: int) -> str:
        """The folder of one version, below the store's folder of weights: each save has a separate version."""
        return f"{self.model.replace(':', '-')}/{self.kind}/{self.name}/{version}"


def checked_name(name: str) -> str:
    """A name that a client chose; `ApiError` unless it is one plain word."""
    if not _NAME.fullmatch(name):
        raise ApiError(f"the name {name[:140]!r}; expected letters, digits, '.', '_' and '-', 128 at most")
    return name


def parse_path(path: str) -> WeightsPath:
    """The parts of a `tinker://` path; `ApiError` for any other text."""
    parts = stored_path(path)
    if path.startswith(_SCHEME) and parts.kind in KINDS and _MODEL.fullmatch(parts.model):
        checked_name(parts.name)
        return parts
    raise ApiError(f"the path {path[:200]!r}; expected tinker://<model id>/weights/<name>, or /sampler_weights/<name>")


def stored_path(path: str) -> WeightsPath:
    """The parts of a `tinker://` path that the store holds. Such a path is not checked again: an entry from another
    version of this code must not fail the routes and the sweep that go through all entries."""
    model, _, rest = path.removeprefix(_SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    return WeightsPath(model, cast(Kind, kind), name)
