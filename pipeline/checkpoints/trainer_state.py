"""What a checkpoint holds besides the tensors.

Owns `TrainerState`, its wire form and its version. Promises that bytes of another version or shape raise
`CheckpointError`. Must not know torch, nor where a checkpoint is kept.
"""

from typing import Literal

import msgspec

from pipeline.errors import CheckpointError

STATE_VERSION = 2
PhaseName = Literal["sft", "rl", "serve"]
PHASES: tuple[PhaseName, ...] = ("sft", "rl", "serve")
"""The jobs of a run in their order; a run that serves has one alone."""


class OfflineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job that stands alone is.

    Attributes:
        identity: tells the job from any other.
        before: steps that earlier jobs did on the same state; its own come on top.
    """

    identity: str
    before: int


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a trainer, which moves together with its tensors.

    Attributes:
        job: the job that was training.
        step: steps done in that job; of jobs that stand alone, in all that had this state.
        models: names of the models whose tensors it moves with.
        ledger: snapshot of the ledger; of a run.
        ledger_bytes: size of `ledger.jsonl` that the snapshot covers; of a run.
        covered: ids of the entries of the stream `prepared` that this checkpoint covers, which may be acknowledged once
            it is durable; of a run.
        data: digest of the rows of the dataset that the job trains; empty without one.
        alone: of a job that stands alone; None in a run.
        served: of a run that serves, the models of its clients, in the trainer's own form.
        version: of this record, and of how tensors are named beside it.
    """

    job: PhaseName
    step: int
    models: tuple[str, ...] = ()
    ledger: bytes = b""
    ledger_bytes: int = 0
    covered: tuple[str, ...] = ()
    data: str = ""
    alone: OfflineProgress | None = None
    served: bytes = b""
    version: int = STATE_VERSION


class _Header(msgspec.Struct):
    version: int


def encode_state(state: TrainerState) -> bytes:
    """The state as msgpack bytes."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes, where: str) -> TrainerState:
    """The state in `data`; `CheckpointError` naming `where` if it is none of this version."""
    try:
        version = msgspec.msgpack.decode(data, type=_Header).version  # before all else: of another, nothing is known
        if version == STATE_VERSION:
            return msgspec.msgpack.decode(data, type=TrainerState)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{where} is no trainer state: {error}") from error
    hint = "go on with the Rollcall that wrote it, or start anew elsewhere"
    raise CheckpointError(f"{where} has version {version}; this code reads version {STATE_VERSION}; {hint}")
