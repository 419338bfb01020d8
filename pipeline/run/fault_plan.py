"""The faults that a user injects into a run, `faults=[…]`: their grammar.

    faults='[kill:inference[0]@step=7, stop:trainer@save, exit:actor@20s]'

    fault   KIND:TARGET@MOMENT
    KIND    kill (SIGKILL), stop (SIGSTOP), exit (exit code 1), early (exit code 0), torn (a file is cut in half),
            full (writes find no room), slow (each file operation takes longer), partition (a node's packets to and
            from other nodes are lost), late (the files of other nodes appear late)
    TARGET  redis, trainer, inference, actor or preprocessor, with an index such as inference[1] (default 0);
            of torn: checkpoint, the newest complete one; of full: disk=30s, for 30 seconds, or disk, until the attempt
            ends; of slow: filesystem=2s, 2 seconds longer; of partition: node[1]=20s, the node of rank 1 for 20
            seconds, or node[1], until the attempt ends; of late: names=5s, 5 seconds late
    MOMENT  step=N (step N of RL is logged), 20s (seconds since the attempt's roles were started), start (the target
            starts), sft (a step of SFT is logged), eval (an evaluation is requested), save (a checkpoint is being
            written), update (servers are receiving new weights), end (the last checkpoint is durable). The moments
            sft, eval, save and update are those of step N with a number, as in save=10, else the first ones.
            every=60s: every 60 seconds from the start of the roles on
            late has no moment, as in late:names=5s: it lasts as long as the run

Each other fault without `every` happens once in a run, also over restarts and requeues. Pure;
`pipeline.run.fault_moments` has the records on disk, and `slurm.agent.fault_injection` injects.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import quote

FAULT = "fault"
"""The state of a role's line in the timeline that records a fault."""
KINDS = ("kill", "stop", "exit", "early", "torn", "full", "slow", "partition", "late")
ROLES = ("redis", "trainer", "inference", "actor", "preprocessor")
CHECKPOINT = "checkpoint"
DISK_TARGETS = ("disk", "filesystem")
"""The targets of `full` and `slow`: the run directory, for all processes of the attempt that are Python."""
NODE, NAMES = "node", "names"
"""The targets of `partition`, whose index is the rank of the node, and of `late`."""
TARGETS = {
    "kill": ROLES,
    "stop": ROLES,
    "exit": ROLES,
    "early": ROLES,
    "torn": (CHECKPOINT,),
    "full": ("disk",),
    "slow": ("filesystem",),
    "partition": (NODE,),
    "late": (NAMES,),
}
"""The targets of each kind."""
_WITH_SECONDS, _NEEDS_SECONDS = frozenset({*DISK_TARGETS, NODE, NAMES}), frozenset({"slow", "late"})
_WITH_INDEX = frozenset({*ROLES, NODE})
NUMBERED_MOMENTS = ("sft", "eval", "save", "update")
"""The moments of a step; its number may be left out."""
GRAMMAR = (
    "KIND:TARGET@MOMENT, such as kill:inference[0]@step=7, stop:trainer@save or exit:actor@20s, with KIND one of "
    f"{', '.join(KINDS)}, TARGET one of {', '.join(ROLES)} (torn: {CHECKPOINT}; full: disk or disk=Ns; slow: "
    f"filesystem=Ns; partition: {NODE}[N] or {NODE}[N]=Ns; late: {NAMES}=Ns, without a MOMENT), and MOMENT one of "
    f"step=N, Ns, every=Ns, start, end, {', '.join(NUMBERED_MOMENTS)} (or {NUMBERED_MOMENTS[0]}=N, …)"
)
_MOMENT, _EVERY, _SECONDS, _TARGET = (
    re.compile(rf"(start|end|{'|'.join(NUMBERED_MOMENTS)})|(step|{'|'.join(NUMBERED_MOMENTS)})=(\d+)"),
    re.compile(r"every=([1-9]\d*)s"),
    re.compile(r"(\d+(?:\.\d+)?)s"),
    re.compile(r"(\w+)(?:\[(\d+)\])?(?:=(\d+(?:\.\d+)?)s)?"),
)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        text: as the user wrote it, without spaces.
        kind, target, index: one of `KINDS`; one of its `TARGETS`, and the target's index (of a node: its rank).
        moment: `start`, `end`, `step` or one of `NUMBERED_MOMENTS`; empty with `seconds` or `period`, and of `late`.
        number: the step of the moment; None for the first such moment.
        seconds: since the attempt's roles were started; None with a `moment`.
        period: seconds from one time to the next, of a fault that happens again and again; else None.
        repetition: the number of equal faults before it in the list, or of its times before.
        amount: seconds of `full` or `partition` until it ends, of `slow` for each operation, or of `late` until a name
            appears; None without such.
    """

    text: str
    kind: str
    target: str
    index: int
    moment: str
    number: int | None = None
    seconds: float | None = None
    period: float | None = None
    repetition: int = 0
    amount: float | None = None

    @property
    def mark(self) -> str:
        """The file name of its record in the run directory."""
        return quote(f"{self.text}#{self.repetition}" if self.repetition else self.text, safe="")

    def is_of(self, moment: str, number: int | None) -> bool:
        """Whether the fault belongs to this moment, which is that of step `number`, or of none."""
        return self.moment == moment and self.number in (None, number)


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """The faults of `faults=`; `ValueError` names the first wrong part and the grammar."""
    seen = Counter[str]()
    faults = []
    for text in ("".join(text.split()) for text in texts):
        faults.append(_parse(text, seen[text]))
        seen[text] += 1
    return tuple(faults)


def _parse(text: str, repetition: int) -> Fault:
    kind, colon, rest = text.partition(":")
    named, at, moment = rest.partition("@")
    if not colon or (not at and kind != "late"):
        raise _error(text, text, "is no KIND:TARGET@MOMENT")
    if kind not in KINDS:
        raise _error(text, kind, "is no KIND")
    target, index, amount = _parse_target(text, kind, named)
    fault = Fault(text, kind, target, index, "", repetition=repetition, amount=amount)
    if kind == "late":
        if at:
            raise _error(text, f"@{moment}", "is too much: late lasts as long as the run")
        return fault
    return _at_moment(fault, moment)


def _parse_target(text: str, kind: str, named: str) -> tuple[str, int, float | None]:
    """The target with its index and its seconds."""
    match = _TARGET.fullmatch(named)
    if match is None or match[1] not in TARGETS[kind]:
        raise _error(text, named, f"is no target of {kind}, which has {', '.join(TARGETS[kind])}")
    target, index, seconds = match.groups()
    if (seconds is not None and target not in _WITH_SECONDS) or (kind in _NEEDS_SECONDS and seconds is None):
        raise _error(text, named, "is no target with seconds" if seconds else "has no seconds")
    if index is not None and target not in _WITH_INDEX:
        raise _error(text, named, "is no target with an index")
    return target, int(index or 0), float(seconds) if seconds else None


def _at_moment(fault: Fault, moment: str) -> Fault:
    if seconds := _SECONDS.fullmatch(moment):
        return replace(fault, seconds=float(seconds[1]))
    if every := _EVERY.fullmatch(moment):
        return replace(fault, period=float(every[1]))
    match = _MOMENT.fullmatch(moment)
    if match is None:
        raise _error(fault.text, moment, "is no MOMENT")
    if fault.kind == "torn" and moment == "start":
        raise _error(fault.text, moment, "is no moment of a checkpoint")
    return replace(fault, moment=match[1] or match[2], number=int(match[3]) if match[3] else None)


def _error(text: str, part: str, problem: str) -> ValueError:
    return ValueError(f"{GRAMMAR}; in {text!r}, {part!r} {problem}")
