"""How far generation may run ahead of training.

Owns the rule of `training.max_lag`: at admission (`StalenessGate`, in the actor) and at the trainer (`is_refused`,
`is_fresh`). A pure state machine: numbers in, a limit out; it owns no task, client or clock, and is neither
backpressure nor completion.

Words: the trainer's version v is the steps it has done; one step trains P groups. A group is outstanding from
the moment it is issued until the trainer settles it (trained, filtered or failed). A sample made by weights w and
trained at version v has lag v − w.

Why it holds. With q groups outstanding, a group issued now is trained, in order of issue, after those q, hence at
version v + ⌊q / P⌋ at the latest. Its weights are at least those of the slowest server, w. So its lag is at most L when

    v + ⌊q / P⌋ − w ≤ L      that is      q < P · (L + 1 − (v − w))

Worked example, P = 32 and L = 1, all servers at the trainer's version 5: up to 64 groups may be outstanding: 32 that
train now and 32 for the next step. The trainer steps to 6 and settles 32; while the servers are still at 5 the limit is
32, which are outstanding, so nothing is issued: it would be trained at 7 with weights 5. A server at 6 opens the gate.

Groups that overtake each other may miss the bound by what was overtaken. The trainer refuses those by their `lag` and
asks for them again, so what is trained always keeps it. With `training.stale=mask` it holds token by token: a sample
goes on while its server gets new weights, so its later tokens may be `is_fresh` when its first ones are too old. The
young ones count, the others are only read, and a group is refused when it has no young token.

A group that is always overtaken would be refused for ever. So a group that was refused twice is awaited until it is
published: meanwhile the gate counts it as a server at the version w with which it was issued, whatever the servers are
at. Not the first time: that is mostly chance (its answer came late, or was long), and to wait for a group empties the
servers.

Invariant: while a group is awaited, at most P · (L + 1 − (v − w)) groups are outstanding, itself among them. It holds
when the group is issued, for the gate let it in; a step takes P from both sides; and nothing more is issued than it
allows. So at v = w + L there are at most P − 1 others, too few for a step: the trainer gets the group before it steps
on, with lag L. Hence a group is refused at most twice, however slow it is.

Worked example, P = 32 and L = 1: group 7 was refused twice, and is issued again at version 5, when 40 others are
outstanding. 23 more may follow. The trainer steps to 6 and settles 32, the servers step to 6, and no group is issued:
31 others are outstanding, with which the trainer cannot step to 7. When group 7 is published, 32 more may be issued.

    gate = Gate(prompts_per_step=32, max_lag=1)
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
    """Admission of new groups; closed until it knows the trainer and one server."""

    prompts_per_step: int
    max_lag: int
    version: int = 0
    slowest: int | None = None
    _awaited: dict[int, int] = field(default_factory=dict)

    def advance(self, version: int, slowest: int | None) -> None:
        """The trainer is at `version`, the slowest server that may answer at `slowest`; None when there is no server.

        Either may go back: a trainer that restarts goes on from its last checkpoint.
        """
        self.version, self.slowest = version, slowest

    def wait_for(self, position: int) -> None:
        """A position that was refused twice is issued again: let it not be overtaken until it `arrived`."""
        if self.slowest is not None:
            self._awaited.setdefault(position, self.slowest)

    def arrived(self, position: int) -> None:
        """A position was published: whatever is published later cannot overtake it."""
        self._awaited.pop(position, None)

    @property
    def limit(self) -> int:
        """Most groups that may be outstanding."""
        if self.slowest is None:
            return 0
        behind = max(0, self.version - min([self.slowest, *self._awaited.values()]))
        return max(0, self.prompts_per_step * (self.max_lag + 1 - behind))

    def room(self, outstanding: int) -> int:
        """How many groups may be issued now, given those outstanding."""
        return max(0, self.limit - outstanding)


def lag(version: int, group: Group) -> int:
    """Steps between the oldest weights that sampled a group and those that train it, `version`.

    Negative after the trainer went back to a checkpoint; 0 for a group without samples.
    """
    return max((version - sample.version_min for sample in group.samples), default=0)


def is_refused(version: int, group: Group, max_lag: int, stale: Stale, masked: str | None = None) -> bool:
    """Whether a group is too old to be trained at `version`, and is asked for again. Of samples that ended as `masked`
    says no token counts, however young."""
    if lag(version, group) <= max_lag:
        return False
    rows = (row for sample in group.samples if sample.finish != masked for row in sample.rows())
    return stale == "refuse" or not any(is_fresh(row, version - max_lag).any() for row in rows)


def is_fresh(row: TokenRow, oldest: int) -> NDArray[np.bool_]:
    """bool[T]: the tokens that were sampled by weights of version `oldest` or later."""
    return np.logical_and(row.sampled, row.versions >= oldest)
