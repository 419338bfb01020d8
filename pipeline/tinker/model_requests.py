"""Requests to models, in the gateway's memory.

Owns the state of each request in addition to the store, and the classification of bodies for a replay. Pure except for
events.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.tinker import tinker_paths
from pipeline.tinker.entities import Model
from pipeline.tinker.request_queue import ModelQueue
from pipeline.tinker.tinker_paths import WeightsPath
from pipeline.tinker.tinker_records import STATEFUL, Body, Failed, Load, Pass, Result, Save, Step, Unload, Work
from pipeline.tinker.usage_meter import Usage

UNLOAD_SEQ = 1 << 40
"""The number of the request to unload a model: above all numbers of clients (`tinker_paths.MAX_NUMBER`)."""
GONE = Failed("the model was unloaded, or its session has ended", "user")
bodies: "msgspec.msgpack.Decoder[Any]" = msgspec.msgpack.Decoder(Body)
results: "msgspec.msgpack.Decoder[Any]" = msgspec.msgpack.Decoder(Result)


@dataclass(eq=False)
class Request:
    """One request to a model. Its body and its result are in the store; here is only what fails it.

    Attributes:
        stateful: whether doing it changes the model.
        steps: whether doing it uses the gradients up.
        open: its body is in the store.
        reads: the folder that doing it reads, if any.
        saves: what it saves, if anything.
        answered: when it got its result (seconds since the epoch), or when this process first saw that; 0 until then.
        failure: the result, if that is why nothing was done.
        deliveries: how often a trainer got it and gave no answer.
        served: when a client got the result; 0 until then.
    """

    id: str
    model: str
    seq: int
    stateful: bool = False
    steps: bool = False
    open: bool = True
    reads: str = ""
    saves: "SaveNote | None" = None
    answered: float = 0.0
    failure: Failed | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    deliveries: int = 0
    served: float = 0.0

    tokens: int = 0
    """Tokens of a pass; `backward`: a pass with gradients."""
    backward: bool = False
    handed: float = 0.0
    """When a trainer got it last (`time.monotonic`); 0: none did since this process started."""

    def understand(self, body: Body) -> None:
        """Note what doing this body means."""
        if isinstance(body, Pass):
            self.tokens, self.backward = sum(datum.length for datum in body.data), body.backward
        self.stateful = isinstance(body, STATEFUL) or (isinstance(body, Pass) and body.backward)
        self.steps = isinstance(body, Step)
        self.reads = body.folder if isinstance(body, Load) else ""
        self.saves = msgspec.json.decode(body.note, type=SaveNote) if isinstance(body, Save) else None

    def finish(self, result: Result | None, now: float) -> None:
        """Note that it has its result; None: one that is no failure."""
        self.answered, self.failure = now, result if isinstance(result, Failed) else None
        self.done.set()

    def usage(self) -> Usage:
        """What it used, once it has its result."""
        seconds = time.monotonic() - self.handed if self.handed else 0.0
        trained, scored = (self.tokens, 0) if self.backward else (0, self.tokens)
        return Usage(requests=1, trained_tokens=trained, scored_tokens=scored, trainer_seconds=seconds)

    @property
    def needs_replay(self) -> bool:
        """Whether a trainer that lost it has to do it again, or for the first time."""
        return not self.answered or (self.stateful and self.failure is None)


@dataclass(eq=False)
class ModelEntry:
    """A model's requests, by number."""

    fact: Model
    queue: ModelQueue
    requests: dict[int, Request] = field(default_factory=dict)
    cursors: tuple[int, int] = (-1, -1)
    """What the last two durable commits have behind them."""
    committed_cursor: int = -1
    """Up to this request nothing can be done again."""
    lost: str = ""
    unloading: bool = False
    unloaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once no trainer has it any more."""

    requested: float = 0.0
    """When its client last asked for something (seconds since the epoch), as far as is known after a start."""

    def __post_init__(self) -> None:
        self.requested = max(self.requested, self.fact.created)
        if self.fact.gone:
            self.unloaded.set()

    @property
    def open_saves(self) -> "list[SaveNote]":
        """What is being saved: accepted and not answered yet."""
        saves = ((request.saves, request.answered) for request in self.requests.values())
        return [note for note, answered in saves if note is not None and not answered]


class SaveNote(msgspec.Struct, frozen=True):
    """What the gateway remembers of a `Save` until it is done: the client's name for it, how long it is kept (seconds),
    and the sampler that it is made for."""

    path: str
    ttl: int | None = None
    metadata: dict[str, str] | None = None
    sampler: str = ""


def save_body(path: WeightsPath, version: int, note: SaveNote) -> Save:
    """The request of a trainer to write a checkpoint."""
    return Save(path.folder(version), path.kind != "weights", msgspec.json.encode(note).decode())


def unload_work(model: str) -> Work:
    """What has a trainer forget a model, after all its requests."""
    return Work(tinker_paths.request_id(model, UNLOAD_SEQ), model, UNLOAD_SEQ, Unload())
