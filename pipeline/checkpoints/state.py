"""What a checkpoint holds besides the tensors.

Owns `TrainerState`, its wire form and its version. Promises that bytes of another version or shape raise
`CheckpointError`. Must not know torch, nor where a checkpoint is kept.
"""

from typing import Literal

import msgspec

from pipeline.errors import CheckpointError

STATE_VERSION = 1
Job = Literal["sft", "rl"]
JOBS: tuple[Job, ...] = ("sft", "rl")
"""The jobs of a run in their order."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run, which moves together with its tensors.

    Attributes:
        job: the job that was training.
        step: steps done in that job.
        ledger: snapshot of the ledger.
        ledger_bytes: size of `ledger.jsonl` that the snapshot covers.
        acknowledge: by topic, the ids of stream entries that this checkpoint covers and that may be acknowledged now.
        version: of this record.
    """

    job: Job
    step: int
    ledger: bytes = b""
    ledger_bytes: int = 0
    acknowledge: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    version: int = STATE_VERSION


def encode_state(state: TrainerState) -> bytes:
    """The state as msgpack bytes."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes, where: str) -> TrainerState:
    """The state in `data`; `CheckpointError` naming `where` if it is none of this version."""
    try:
        state = msgspec.msgpack.decode(data, type=TrainerState)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{where} is no trainer state: {error}") from error
    if state.version != STATE_VERSION:
        raise CheckpointError(f"{where} has version {state.version}; this code reads version {STATE_VERSION}")
    return state
