"""Which prompt is whose turn, and what became of it.

Owns the order of prompts and the ledger: every position of the run and whether it is settled. A position is a
place in the issue order, 0, 1, 2, …; epoch `position // size` is a permutation of all `size` prompts that depends on
the seed alone. A position is settled once: trained, filtered or failed. Pure: no I/O and no clock.

Invariant: everything below `watermark` is settled, `watermark` itself is not, and `above` holds what is settled beyond.
So the ledger stays small however long the run is: it holds what is out of order, not what is done.

The trainer owns the one ledger and commits it with the model. After a crash it goes on from the committed one, so what
was settled since comes again and is settled again: once for the model that exists.

    ledger = Ledger()
    ledger.settle(0, "trained", step=1)       # True
    ledger.settle(0, "trained", step=2)       # False: a duplicate
    Ledger.restore(ledger.snapshot())
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from pipeline.errors import RecordError

TRAINED = "trained"


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """A position's end: its `outcome` (`trained`, `filtered: …` or `failed: …`) at step `step`."""

    position: int
    outcome: str
    step: int


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Wire form of a ledger."""

    watermark: int
    above: tuple[int, ...]
    outcomes: dict[str, int]


class Ledger:
    """The settled positions of a run."""

    def __init__(self) -> None:
        self._watermark = 0
        self._above: set[int] = set()
        self._outcomes: Counter[str] = Counter()
        self._news: list[Settlement] = []

    @property
    def watermark(self) -> int:
        """The first position that is not settled."""
        return self._watermark

    @property
    def done_count(self) -> int:
        """How many positions are settled."""
        return self._watermark + len(self._above)

    @property
    def outcomes(self) -> dict[str, int]:
        """How many positions ended in which outcome."""
        return dict(self._outcomes)

    def is_done(self, position: int) -> bool:
        """Whether a position is settled."""
        return position < self._watermark or position in self._above

    def mark_done(self, position: int, outcome: str, step: int) -> bool:
        """Settle a position (not negative); False, and no change, when it was settled before."""
        if self.is_done(position):
            return False
        self._above.add(position)
        while self._watermark in self._above:
            self._above.remove(self._watermark)
            self._watermark += 1
        self._outcomes[outcome] += 1
        self._news.append(Settlement(position=position, outcome=outcome, step=step))
        return True

    def unissued(self, known: Iterable[int]) -> tuple[list[int], int]:
        """What is left to issue, when the unsettled positions in `known` exist already.

        Returns the positions that are neither settled nor known although later ones are, in order, and the first
        position that was never issued.
        """
        issued = self._above | set(known)
        first_new = max(issued, default=self._watermark - 1) + 1
        first_new = max(first_new, self._watermark)
        return [position for position in range(self._watermark, first_new) if position not in issued], first_new

    def drain_changes(self) -> list[Settlement]:
        """What was settled since the last call, in order: the lines of `ledger.jsonl`. Not part of a snapshot."""
        news, self._news = self._news, []
        return news

    def snapshot(self) -> bytes:
        """The ledger as msgpack."""
        above = tuple(sorted(self._above))
        return msgspec.msgpack.encode(_Snapshot(watermark=self._watermark, above=above, outcomes=dict(self._outcomes)))

    @classmethod
    def restore(cls, data: bytes) -> "Ledger":
        """The ledger of a snapshot; `RecordError` when it is none."""
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

    A permutation without a table: a Feistel network over the next power of four, walked until it lands below `size`
    (Black and Rogaway 2002). The same on every machine and in every version of every library.
    """
    epoch, place = divmod(position, size)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    key = f"{seed} {epoch}".encode()
    while True:
        place = _shuffle(place, half, key)
        if place < size:
            return place


_ROUNDS = 4


def _shuffle(value: int, half: int, key: bytes) -> int:
    """A permutation of the integers below 2^(2·half)."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        digest = hashlib.blake2b(b"%d %d" % (turn, right), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half | right
