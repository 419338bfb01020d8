"""The messages between gateway and trainer, and the records in the store.

Owns the records of the API in the project's own types: a client's request after the wire format was parsed, and its
result. Numbers are the bytes of arrays, so that no copy is needed on the way. Must not know HTTP, protobuf, torch or
SQL.

    work = Work(request="s:train:0:3", model="s:train:0", seq=3, body=Pass(…))       gateway → trainer
    done = Done(request=work.request, result=Passed(…))                              trainer → gateway
"""

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Category = Literal["user", "server"]


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence and what is asked about it; see `pipeline.train.batching.logprob_queries.QueryRow`.

    Attributes:
        tokens: int32[N].
        at: int64[Q], positions 0 … N − 1.
        targets: int32[Q].
        columns: float32[Q] each.
        width: of the answer: 0 for [N], else K for [N, K].
        cells: int64[Q], where each answer belongs in the flattened [N, K]; empty: Q = N × max(1, K), in order.
    """

    tokens: bytes
    at: bytes
    targets: bytes
    columns: dict[str, bytes]
    width: int = 0
    cells: bytes = b""

    @property
    def length(self) -> int:
        """N."""
        return len(self.tokens) // 4

    def answer(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The answers to the questions in the form of the answer, flat: 0 where nothing was asked."""
        if not self.cells:
            return values
        whole = np.zeros(self.length * max(1, self.width), np.float32)
        whole[np.frombuffer(self.cells, np.int64)] = values
        return whole


class Adapter(msgspec.Struct, frozen=True):
    """What a model trains: adapters of a rank on some layers of the base; rank 0: all weights of a copy of the base.
    `base` is the name of one of `serve.bases`; empty: the run's base."""

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    base: str = ""

    @property
    def form(self) -> tuple[int, bool, bool, str]:
        """What two adapters have in common that can take each other's weights."""
        return self.rank, self.attention, self.mlp, self.base


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Make a model."""

    adapter: Adapter


class Pass(msgspec.Struct, frozen=True, tag="pass"):
    """The answers about some data and the sum of a loss over them; with `backward`, its gradient is added."""

    data: tuple[Datum, ...]
    loss: str
    settings: dict[str, float]
    backward: bool


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One step of AdamW on what was added up; see `pipeline.train.model.optimizer.AdamSettings`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write the model: for training on (`sampler` false), or as an adapter that servers load; `folder` is below the
    store's folder of weights, and new. The `note` is the gateway's own."""

    folder: str
    sampler: bool
    note: str = ""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Take what a `Save` wrote; with `fresh`, make the model first, which this is the first request of."""

    folder: str
    optimizer: bool
    adapter: Adapter
    fresh: bool


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Forget a model."""


Body = Create | Pass | Step | Save | Load | Unload
STATEFUL = (Create, Step, Load, Unload)
"""What changes a model for good; a `Pass` with `backward` does so until the next `Step`."""


class Work(msgspec.Struct, frozen=True):
    """One request to one model.

    Attributes:
        request: its id.
        model: the model's id.
        seq: its place in the order of the model's requests.
        body: what to do.
        answered: the client has its answer already; it is done again since the models are those of an earlier commit.
    """

    request: str
    model: str
    seq: int
    body: Body
    answered: bool = False


class PassResult(msgspec.Struct, frozen=True, tag="passed"):
    """Answers in the order of the data, float32 each, with the width of each; and metrics by `name:reduction`."""

    logprobs: list[bytes]
    widths: list[int]
    metrics: dict[str, float]


class StepResult(msgspec.Struct, frozen=True, tag="stepped"):
    """Metrics of an optimizer step."""

    metrics: dict[str, float]


class SaveResult(msgspec.Struct, frozen=True, tag="saved"):
    """The number of bytes written; the gateway adds the path, and the sampler that the save was made for."""

    size: int
    path: str = ""
    sampler: str = ""


class Acknowledged(msgspec.Struct, frozen=True, tag="plain"):
    """Done; there is nothing to say."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing was done, for this reason."""

    error: str
    category: Category


Result = PassResult | StepResult | SaveResult | Acknowledged | Failed


class WorkResult(msgspec.Struct, frozen=True):
    """What became of a request."""

    request: str
    result: Result


class Pool(msgspec.Struct, frozen=True):
    """The servers of one base and its adapters, or of whole models that were trained from it; see
    `pipeline.tinker.server_pools`. The run's own base has no name here."""

    base: str = ""
    whole: bool = False


class ServerFacts(msgspec.Struct, frozen=True):
    """Where the servers are that sample, and the pool of each; none: all are of the run's base."""

    servers: tuple[str, ...] = ()
    password: str = ""
    pools: tuple[Pool, ...] = ()


class Attach(msgspec.Struct, frozen=True):
    """A trainer comes: which attempt, and the last request that each of its models has behind it."""

    attempt: str
    cursors: dict[str, int]
    facts: ServerFacts


class TrainerTurn(msgspec.Struct, frozen=True):
    """A trainer's turn: its results since the last turn, the cursors of a commit that became durable meanwhile, and how
    many seconds the trainer would wait for work; a trainer that is `ending` takes none."""

    attempt: str
    done: tuple[WorkResult, ...] = ()
    committed: dict[str, int] | None = None
    seconds: float = 0.0
    ending: bool = False


def encode(record: Any) -> bytes:
    return msgspec.msgpack.encode(record)
