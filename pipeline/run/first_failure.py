"""The first failure of an attempt.

Owns the document `first_failure.json`: the first failure, its place, and its remedy. Promises that a failure reads as
one line, and always contains the next step. Pure: the agents write it, the launcher and the report show it.
"""

from typing import NamedTuple

import msgspec


class Remedy(NamedTuple):
    """The kind of a failure, a phrase that identifies it, and what to do."""

    kind: str
    phrase: str
    advice: str


REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        "out of memory",
        "for lack of memory",
        "the memory of the node or of the job ran out: ask for more (cluster.memory), or for less (--dry-run shows "
        "what the roles need)",
    ),
    Remedy(
        "out of memory",
        "out of memory",
        "memory ran out: lower training.micro_batch_tokens, inference.kv_cache_bytes or rollout.concurrency",
    ),
    Remedy(
        "out of memory",
        "MemoryError",
        "memory ran out: lower training.micro_batch_tokens or give the role a separate node",
    ),
    Remedy(
        "disk full",
        "No space left on device",
        "the disk is full: free space, or move the run directory and set output to its place",
    ),
    Remedy(
        "disk full",
        "Disk quota exceeded",
        "your quota of the disk is used up: free space, or move the run directory and set output to its place",
    ),
    Remedy(
        "missing package",
        "ModuleNotFoundError",
        "a package is missing: install the project again in this environment",
    ),
    Remedy(
        "broken package",
        "ImportError",
        "a package does not fit the others, or a library that it needs is missing: install the project again in this "
        "environment",
    ),
    Remedy("port taken", "Address already in use", "a port was taken by a foreign process: submit again"),
    Remedy("slow start", "to become ready", "it started too slowly: read its log, or raise cluster.startup_seconds"),
    Remedy(
        "hang",
        "hung: ",
        "its log ends with its stacks, where it has any; if it was only slow, raise cluster.heartbeat_seconds",
    ),
    Remedy(
        "lost node",
        "no sign of life for",
        "its node, or the node's disk or network, is gone: the same command resumes the run; exclude the node "
        "(cluster.exclude) if it happens there again",
    ),
    Remedy(
        "damaged weights",
        "is not what was saved",
        "a file of a checkpoint changed after it was written: check the disk; the same command resumes from the newest "
        "checkpoint that is whole",
    ),
    Remedy(
        "damaged weights",
        "SafetensorError",
        "a file of the model is damaged or incomplete: download or copy model.path again",
    ),
    Remedy(
        "GPU error",
        "CUDA error",
        "a GPU or its driver failed: look for Xid lines in dmesg, and exclude the node (cluster.exclude) if it happens "
        "there again",
    ),
    Remedy(
        "killed",
        "SIGKILL",
        "it was killed from outside, often by the kernel when memory ran out: see dmesg, then submit again",
    ),
    Remedy("timeout", "DeadlineError", "read the log of what it waited for; the same command resumes the run"),
)
"""Kinds and remedies, by the first phrase that occurs in the cause or in the last log lines."""


class FirstFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The first failure of an attempt.

    Attributes:
        role: the role and its index (`actor.0`), or `agent.<rank>`.
        rank: the rank on which it ran.
        cause: `killed by SIGKILL`, `exited with code 1`, or the text of an error.
        exit_code: exit code of its process (negative: the signal); None when no process exited.
        time: seconds since the epoch.
        log: path of the role's log.
        last_lines: the end of that log.
        stacks: of a process that hung, the stacks of its threads: the Python stacks, else the kernel's.
        hint: the remedy; derived from the other fields when it is empty.
    """

    role: str
    rank: int
    cause: str
    exit_code: int | None
    time: float
    log: str
    last_lines: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    hint: str = ""

    def __post_init__(self) -> None:
        if not self.hint:
            msgspec.structs.force_setattr(self, "hint", self._advice())

    def one_line(self) -> str:
        """The failure as one line for a terminal: role, rank, cause, last line of its log, and remedy."""
        last = next((line.strip() for line in reversed(self.last_lines) if any(map(str.isalnum, line))), "")
        story = f"{self.role} on rank {self.rank}: {self.cause}"
        if last and last not in self.cause:
            story += f" (last line: {last})"
        return " ".join(f"{story}; {self.hint}".split())

    @property
    def kind(self) -> str:
        """The kind of the failure, such as `out of memory`; `crash` if no remedy is known for it."""
        remedy = self._remedy()
        return remedy.kind if remedy else "crash"

    def _advice(self) -> str:
        remedy = self._remedy()
        return (
            remedy.advice if remedy else f"read {self.log or 'the log of its rank'}; the same command resumes the run"
        )

    def _remedy(self) -> Remedy | None:
        text = "\n".join((self.cause, *self.last_lines))
        return next((remedy for remedy in REMEDIES if remedy.phrase in text), None)
