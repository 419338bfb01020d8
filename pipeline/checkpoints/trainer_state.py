"""The content of a checkpoint in addition to the tensors: `TrainerState`, its encoding and its version.

Bytes of another version or shape raise `CheckpointError`.
"""

from typing import Literal

import msgspec

from pipeline.errors import CheckpointError

STATE_VERSION = 2
PhaseName = Literal["sft", "preference", "rl", "serve"]
PHASES: tuple[PhaseName, ...] = ("sft", "preference", "rl", "serve")
"""The phases of a run in their order. A run that serves has only one."""

DATASET_PHASES: tuple[PhaseName, ...] = ("sft", "preference")
"""The phases that train a dataset, whose digest a checkpoint stores."""


class OfflineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an offline job, one that is read from a file.

    Attributes:
        identity: the unique identity of the job.
        before: steps that earlier jobs trained on the same state. The job's own steps are added to them.
    """

    identity: str
    before: int


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a trainer, which moves together with its tensors.

    Attributes:
        job: the phase that was training.
        step: steps done in that phase; for offline jobs, the steps of all jobs on this state.
        models: names of the models whose tensors belong to this position.
        ledger: snapshot of the ledger (runs only).
        ledger_bytes: size of `ledger.jsonl` that the snapshot covers (runs only).
        covered: ids of the entries of the stream `prepared` that this checkpoint covers. They may be acknowledged once
            the checkpoint is durable (runs only).
        data: digest of the rows of the trained dataset; empty without one.
        alone: the progress of an offline job; None in a run.
        served: the clients' models of a run that serves, in the trainer's encoding.
        version: version of this record, and of the names of the tensors next to it.
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
    """The state in `data`. `CheckpointError`, which names `where`, for another version or shape."""
    try:
        version = msgspec.msgpack.decode(data, type=_Header).version  # first: the fields depend on the version
        if version == STATE_VERSION:
            return msgspec.msgpack.decode(data, type=TrainerState)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{where} is no trainer state: {error}") from error
    hint = "use the version of Rollcall that wrote it, or start over elsewhere"
    raise CheckpointError(f"{where} has version {version}; this code reads version {STATE_VERSION}; {hint}")
