"""The first failure of an attempt.

Owns the document `first_failure.json`: the first failure, its place, and its remedy. Promises that a failure reads as
one line, and always contains the next step. Pure: the agents write it, the launcher and the report show it.
"""

import msgspec

_ADVICE: tuple[tuple[str, str], ...] = (
    (
        "for lack of memory",
        "the memory of the node or of the job ran out: ask for more (cluster.memory), or for less (--dry-run shows "
        "what the roles need)",
    ),
    (
        "out of memory",
        "memory ran out: lower training.micro_batch_tokens, inference.kv_cache_bytes or rollout.concurrency",
    ),
    ("MemoryError", "memory ran out: lower training.micro_batch_tokens or give the role a separate node"),
    ("No space left on device", "the disk is full: free space, or move the run directory and set output to its place"),
    ("ModuleNotFoundError", "a package is missing: install the project again in this environment"),
    ("Address already in use", "a port was taken by a foreign process: submit again"),
    ("to become ready", "it started too slowly: read its log, or raise cluster.startup_seconds"),
    ("hung: ", "its log ends with its stacks, where it has any; if it was only slow, raise cluster.heartbeat_seconds"),
    ("SIGKILL", "it was killed from outside, often by the kernel when memory ran out: see dmesg, then submit again"),
)
"""Remedies, by the first phrase that occurs in the cause or in the last log lines."""


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

    def _advice(self) -> str:
        text = "\n".join((self.cause, *self.last_lines))
        known = next((advice for phrase, advice in _ADVICE if phrase in text), "")
        return known or f"read {self.log or 'the log of its rank'}; the same command resumes the run"
