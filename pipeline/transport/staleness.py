"""The bound on generation ahead of training.

Owns the rule of `training.max_lag`: at admission (`StalenessGate`, in the actor; `is_usable`, for recorded tokens) and
at the trainer (`is_refused`, `is_fresh`). A pure state machine: numbers in, a limit out. It owns no task, client or
clock, and decides neither backpressure nor completion.

Terms: the trainer's version v is the number of steps done; one step trains P groups. A group is outstanding from its
issue until the trainer marks it done (trained, filtered or failed). A sample of policy version w that is trained at
version v has lag v − w.

Why the bound holds. With q groups outstanding, a group issued now is trained, in order of issue, after those q, hence
at version v + ⌊q / P⌋ at the latest. Its weights are at least those of the slowest server, w. So its lag is at most L
when

    v + ⌊q / P⌋ − w ≤ L      that is      q < P · (L + 1 − (v − w))

Worked example, P = 32 and L = 1, all servers at the trainer's version 5: up to 64 groups may be outstanding: 32 for the
current step and 32 for the next. The trainer steps to 6, so 32 groups are done. While the servers are still at 5 the
limit is 32. That many are outstanding, so nothing is issued: a new group would be trained at 7 with weights 5. The
first server at 6 opens the gate.

Groups that overtake each other may exceed the bound by the number of overtaking groups. The trainer refuses groups by
their `lag` and requests them again, so trained groups never exceed it. With `training.stale=mask` the bound holds per
token. A sample continues while its server gets new weights, so its later tokens may be `is_fresh` when its first ones
are too old. Fresh tokens count and the others are context only; a group without any fresh token is refused.

A group that is always overtaken would be refused forever. So a group that was refused twice is awaited until it is
published: in the meantime the gate counts it as a server at the version w at which it was issued, whatever the servers'
versions. Once is not enough, because a first refusal is mostly chance (a late response, or a long sample), and waiting
for a group empties the servers.

Invariant: while a group is awaited, at most P · (L + 1 − (v − w)) groups are outstanding, including itself. It holds
when the group is issued, since the gate admitted it; a step subtracts P from both sides; and no more groups are issued
than the limit allows. So at v = w + L there are at most P − 1 others, too few for a step: the trainer gets the group
before its next step, with lag L. Hence a group is refused at most twice, however slow it is.

Worked example, P = 32 and L = 1: group 7 was refused twice, and is issued again at version 5, when 40 others are
outstanding. 23 more may follow. The trainer steps to 6, 32 groups are done, the servers step to 6, and no group is
issued: 31 others are outstanding, too few for the step to 7. When group 7 is published, 32 more may be issued.

    gate = StalenessGate(prompts_per_step=32, max_lag=1)
    gate.advance(version=5, slowest=5)
    gate.room(outstanding=40)      # 24
    gate.wait_for(7)
    gate.room(outstanding=41)      # 23
    gate.advance(version=6, slowest=6)
    gate.room(outstanding=32)      # 0
    gate.arrived(7)
    gate.room(outstanding=32)      # 32
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.transport.sample_records import Group, TokenRow

Stale = Literal["refuse", "mask"]


@dataclass
class StalenessGate:
    """Admission of new groups; closed until the trainer's version and a server's version are known."""

    prompts_per_step: int
    max_lag: int
    version: int = 0
    slowest: int | None = None
    _awaited: dict[int, int] = field(default_factory=dict)

    def advance(self, version: int, slowest: int | None) -> None:
        """Set the trainer's `version`, and the version of the slowest eligible server; None without a server.

        Either may decrease: a restarted trainer continues from its last checkpoint.
        """
        self.version, self.slowest = version, slowest

    def wait_for(self, position: int) -> None:
        """Hold back later positions until this one, which was refused twice and is issued again, has `arrived`."""
        if self.slowest is not None:
            self._awaited.setdefault(position, self.slowest)

    def arrived(self, position: int) -> None:
        """Release a position that was published: later publications cannot overtake it."""
        self._awaited.pop(position, None)

    @property
    def limit(self) -> int:
        """The largest number of outstanding groups."""
        if self.slowest is None:
            return 0
        # An awaited group counts as a server at the version of its issue.
        behind = max(0, self.version - min([self.slowest, *self._awaited.values()]))
        return max(0, self.prompts_per_step * (self.max_lag + 1 - behind))

    def room(self, outstanding: int) -> int:
        """The number of groups that may be issued now, given the `outstanding` ones."""
        return max(0, self.limit - outstanding)


def lag(version: int, group: Group) -> int:
    """Steps between the oldest weights that sampled a group and the trainer's `version`.

    Negative after the trainer restored an earlier checkpoint; 0 for a group without samples.
    """
    return max((version - sample.version_min for sample in group.samples), default=0)


def is_refused(version: int, group: Group, max_lag: int, stale: Stale, masked: str | None = None) -> bool:
    """Whether a group is too old to be trained at `version`, and must be sampled again. Samples whose finish is
    `masked` have no tokens that count, however fresh."""
    if lag(version, group) <= max_lag:
        return False
    rows = (row for sample in group.samples if sample.finish != masked for row in sample.rows())
    return stale == "refuse" or not any(is_fresh(row, version - max_lag).any() for row in rows)


def is_usable(version_min: int, version_max: int, oldest: int, stale: Stale) -> bool:
    """Whether recorded tokens of these policy versions are worth continuing, where tokens of weights before `oldest`
    are too old now: none of them is, or, if those are masked, not all."""
    return (version_min if stale == "refuse" else version_max) >= oldest


def is_fresh(row: TokenRow, oldest: int) -> NDArray[np.bool_]:
    """bool[T]: the tokens that were sampled by weights of version `oldest` or later."""
    return np.logical_and(row.sampled, row.versions >= oldest)
