"""The faults that a user injects into a run, `faults=[…]`: their grammar.

    faults='[kill:inference[0]@step=7, stop:trainer@save, exit:actor@20s]'

    fault   KIND:TARGET@MOMENT
    KIND    kill (SIGKILL), stop (SIGSTOP), exit (exit code 1), early (exit code 0), torn (a file is cut in half)
    TARGET  redis, trainer, inference, actor or preprocessor, with an index such as inference[1] (default 0);
            of exit and early: trainer, actor or preprocessor; of torn: checkpoint, the newest complete one
    MOMENT  step=N (step N of RL is logged), 20s (seconds since the attempt's roles were started), start (the target
            starts), sft (the first step of SFT is logged), eval (an evaluation is requested), save (a checkpoint is
            being written), update (servers are receiving new weights), end (the last checkpoint is durable)

Each fault happens once in a run, also over restarts and requeues. Pure; `pipeline.run.fault_moments` has the records on
disk, and `slurm.agent.fault_injection` injects.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

FAULT = "fault"
"""The state of a role's line in the timeline that records a fault."""
KINDS = ("kill", "stop", "exit", "early", "torn")
ROLES = ("redis", "trainer", "inference", "actor", "preprocessor")
CHECKPOINT = "checkpoint"
TARGETS = {
    "kill": ROLES,
    "stop": ROLES,
    "exit": ("trainer", "actor", "preprocessor"),
    "early": ("trainer", "actor", "preprocessor"),
    "torn": (CHECKPOINT,),
}
"""The targets of each kind. Only Rollcall's own processes can exit on request."""
NAMED_MOMENTS = ("start", "sft", "eval", "save", "update", "end")
GRAMMAR = (
    "KIND:TARGET@MOMENT, such as kill:inference[0]@step=7, stop:trainer@save or exit:actor@20s, with KIND one of "
    f"{', '.join(KINDS)}, TARGET one of {', '.join(ROLES)} (torn: {CHECKPOINT}), and MOMENT one of step=N, Ns, "
    f"{', '.join(NAMED_MOMENTS)}"
)
_STEP, _SECONDS, _TARGET = (
    re.compile(r"step=([1-9]\d*)"),
    re.compile(r"(\d+(?:\.\d+)?)s"),
    re.compile(r"(\w+)(?:\[(\d+)\])?"),
)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        text: as the user wrote it, without spaces.
        kind, target, index: one of `KINDS`; a role or `CHECKPOINT`, and its index.
        moment: `step=N` or one of `NAMED_MOMENTS`; empty with `seconds`.
        seconds: since the attempt's roles were started; None with a `moment`.
        repetition: the number of equal faults before it in the list.
    """

    text: str
    kind: str
    target: str
    index: int
    moment: str
    seconds: float | None
    repetition: int = 0

    @property
    def mark(self) -> str:
        """The file name of its record in the run directory."""
        return quote(f"{self.text}#{self.repetition}" if self.repetition else self.text, safe="")

    @property
    def step(self) -> int | None:
        """The step of a moment `step=N`."""
        match = _STEP.fullmatch(self.moment)
        return int(match[1]) if match else None


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
    if not (colon and at):
        raise _error(text, text, "is no KIND:TARGET@MOMENT")
    if kind not in KINDS:
        raise _error(text, kind, "is no KIND")
    target = _TARGET.fullmatch(named)
    if target is None or target[1] not in TARGETS[kind]:
        raise _error(text, named, f"is no target of {kind}, which has {', '.join(TARGETS[kind])}")
    seconds = _SECONDS.fullmatch(moment)
    if not (seconds or _STEP.fullmatch(moment) or moment in NAMED_MOMENTS):
        raise _error(text, moment, "is no MOMENT")
    if kind == "torn" and moment == "start":
        raise _error(text, moment, "is no moment of a checkpoint")
    at_seconds = float(seconds[1]) if seconds else None
    return Fault(text, kind, target[1], int(target[2] or 0), "" if seconds else moment, at_seconds, repetition)


def _error(text: str, part: str, problem: str) -> ValueError:
    return ValueError(f"{GRAMMAR}; in {text!r}, {part!r} {problem}")
