"""The order of prompts, and the outcomes of positions.

Owns the order of prompts and the ledger: every position of the run and whether it is done. A position is an index in
the issue order, 0, 1, 2, …; epoch `position // size` is a permutation of all `size` prompts that depends on the seed
alone. A position is marked done once: trained, filtered or failed. Pure: no I/O and no clock.

Invariant: all positions below `watermark` are done, `watermark` itself is not, and `above` holds the done positions
beyond it. The ledger therefore stays small in a long run: its size is the number of positions done out of order.

The trainer owns the only ledger and saves it with the model. After a crash it restores the saved one, so positions done
since then are issued and done again: once for the model that exists.

    ledger = Ledger()
    ledger.mark_done(0, "trained", step=1)       # True
    ledger.mark_done(0, "trained", step=2)       # False: a duplicate
    Ledger.restore(ledger.snapshot())

`ledger.jsonl` has one line per position: when it was issued (the position), which weights sampled it (`versions`), and
when it was trained (`step` and `order`). The lines of one step with an `order` are its batch, in the order of training:

    {"position":17,"outcome":"trained","step":4,"order":1,"versions":[3,4],"fingerprint":"5b0e…","prompt":3,"solved":0.5}
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from pipeline.errors import RecordError

TRAINED = "trained"


class BatchEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a group in the batch of a step, and the samples that it had there.

    Attributes:
        order: index of the group in its batch.
        versions: the oldest and the newest policy version that sampled a token of it.
        fingerprint: `Group.fingerprint` of its samples, which also the stored samples have. A position that is sampled
            again, after a crash, has another one.
    """

    order: int
    versions: tuple[int, int]
    fingerprint: str


class Settlement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a position: one line of `ledger.jsonl`.

    Attributes:
        outcome: `trained`, `filtered: …` or `failed: …`.
        step: the step that had the position in its batch, or that was next when the position was set aside. It is the
            policy version before the step: the row of `metrics.jsonl` has `step + 1`.
        order, versions, fingerprint: as in `BatchEntry`; None and empty for a position that no batch had.
        prompt: index of the prompt in the task's dataset.
        solved: fraction of the group's samples with a reward of at least `rollout.curriculum.correct`; None without
            samples.
    """

    position: int
    outcome: str
    step: int
    order: int | None = None
    versions: tuple[int, int] | None = None
    fingerprint: str = ""
    prompt: int | None = None
    solved: float | None = None


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The wire format of a ledger."""

    watermark: int
    above: tuple[int, ...]
    outcomes: dict[str, int]


class Ledger:
    """The done positions of a run."""

    def __init__(self) -> None:
        self._watermark = 0
        self._above: set[int] = set()
        self._outcomes: Counter[str] = Counter()
        self._changes: list[Settlement] = []

    @property
    def watermark(self) -> int:
        """The first position that is not done."""
        return self._watermark

    @property
    def done_count(self) -> int:
        """The number of done positions."""
        return self._watermark + len(self._above)

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of positions per outcome."""
        return dict(self._outcomes)

    def is_done(self, position: int) -> bool:
        """Whether a position is done."""
        return position < self._watermark or position in self._above

    def mark_done(
        self,
        position: int,
        outcome: str,
        step: int,
        entry: BatchEntry | None = None,
        prompt: int | None = None,
        solved: float | None = None,
    ) -> bool:
        """Mark a position (not negative) as done, with its `entry` if a batch had it, its `prompt` and the fraction of
        its samples that were `solved`; False, without a change, if it was done before."""
        if self.is_done(position):
            return False
        self._above.add(position)
        # Restore the invariant: the watermark is the smallest position that is not done.
        while self._watermark in self._above:
            self._above.remove(self._watermark)
            self._watermark += 1
        self._outcomes[outcome] += 1
        batch = msgspec.structs.asdict(entry) if entry else {}
        line = Settlement(position=position, outcome=outcome, step=step, prompt=prompt, solved=solved, **batch)
        self._changes.append(line)
        return True

    def unissued(self, known: Iterable[int]) -> tuple[list[int], int]:
        """The positions to issue, where the positions in `known` are in progress.

        Returns the positions that are neither done nor known although a later one is, in order, and the first position
        that was never issued.
        """
        issued = self._above | set(known)
        first_new = max(issued, default=self._watermark - 1) + 1
        first_new = max(first_new, self._watermark)
        return [position for position in range(self._watermark, first_new) if position not in issued], first_new

    def drain_changes(self) -> list[Settlement]:
        """Positions done since the last call, in order: the lines of `ledger.jsonl`. Not part of a snapshot."""
        changes, self._changes = self._changes, []
        return changes

    def snapshot(self) -> bytes:
        """The ledger as msgpack."""
        above = tuple(sorted(self._above))
        return msgspec.msgpack.encode(_Snapshot(watermark=self._watermark, above=above, outcomes=dict(self._outcomes)))

    @classmethod
    def restore(cls, data: bytes) -> "Ledger":
        """The ledger of a snapshot; `RecordError` when `data` is no snapshot."""
        try:
            snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as error:
            raise RecordError(f"{len(data)} bytes are no ledger: {error}") from error
        ledger = cls()
        ledger._watermark, ledger._above = snapshot.watermark, set(snapshot.above)
        ledger._outcomes = Counter(snapshot.outcomes)
        return ledger


def prompt_at(position: int, size: int, seed: int) -> int:
    """The prompt (0 ≤ prompt < size) at a position: each epoch of `size` positions visits every prompt once.

    The permutation needs no table: a Feistel network over the next power of four, applied repeatedly until the result
    is below `size` (Black and Rogaway 2002). It is the same on every machine and in every version of every library.
    """
    epoch, index = divmod(position, size)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    key = f"{seed} {epoch}".encode()
    # The domain 2^(2·half) is at most 4 · size, so at most four steps are needed on average.
    while True:
        index = _shuffle(index, half, key)
        if index < size:
            return index


_ROUNDS = 4


def _shuffle(value: int, half: int, key: bytes) -> int:
    """A permutation of the integers below 2^(2·half)."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        digest = hashlib.blake2b(b"%d %d" % (turn, right), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half | right
