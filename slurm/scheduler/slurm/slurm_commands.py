"""Slurm's commands as a `JobQueue`.

Owns the calls of sbatch, scontrol, squeue, sinfo, sacctmgr and scancel, and the parsing of their output. Promises that
every call has a deadline, no shell and none of the user's defaults, and that every failure is a `SchedulerError` of one
line with the command and its message. Parses explicit formats and named fields only, since other output differs among
versions. Must not know runs.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import SchedulerError
from slurm.scheduler.scheduler_protocol import CALL_SECONDS, Nodes, Partition, QueuedJob, user_name
from slurm.scheduler.slurm.slurm_environment import submission_environment

COMMANDS = ("sbatch", "scontrol", "squeue", "sinfo", "scancel")
"""The commands that a machine needs to submit; `sacctmgr` is used for accounts only."""

_UNKNOWN_JOB = "Invalid job id specified"
NO_SUCH_NODES = "Requested node configuration is not available"
"""Slurm's message for nodes that do not exist and, in a dry run, for nodes that are down: only the submission
distinguishes them."""
_NO_ACCOUNTING = "not running a supported accounting_storage"
NO_ANSWER = re.compile(r"timed out|unable to contact|connection refused|communication|unexpected message", re.I)
"""Messages of a command that got no answer, so that the controller may or may not have executed it."""

_NOTHING = ("(null)", "None", "N/A")
_OUT_OF_SERVICE = ("down", "drain", "fail", "error", "unknown", "inval", "block")
"""Prefixes of the states of nodes that accept no job until their repair."""


class SlurmCommands:
    """A `JobQueue` that runs one command for each operation, with a deadline of `seconds` each."""

    def __init__(self, seconds: float = CALL_SECONDS) -> None:
        self._seconds = seconds

    def job(self, job: str) -> QueuedJob | None:
        command = ("scontrol", "--oneliner", "show", "job", job)
        answer = self._run(*command)
        if answer.returncode:
            if _UNKNOWN_JOB in answer.stderr:
                return None
            raise _failed(command, answer)
        return parse_job(answer.stdout)

    def jobs_with(self, word: str) -> list[QueuedJob]:
        output = self._ask("squeue", "--noheader", f"--user={user_name()}", "--format=%i|%k")
        lines = [line.partition("|") for line in output.splitlines()]
        leaders = dict.fromkeys(job.partition("+")[0] for job, _, comment in lines if word in comment.split())
        return [job for leader in leaders if (job := self.job(leader)) is not None and job.live]

    def known(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        if not ids:
            return {}
        command = ("squeue", "--noheader", "--states=all", "--format=%i|%T|%u|%r|%j|%k", f"--jobs={','.join(ids)}")
        answer = self._run(*command)
        if answer.returncode:
            if _UNKNOWN_JOB in answer.stderr:  # Slurm prints this only for a single id
                return {}
            raise _failed(command, answer)
        return parse_queue(answer.stdout)

    def partitions(self) -> list[Partition]:
        return parse_partitions(self._ask("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%T"))

    def accounts(self) -> list[str] | None:
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user_name()}", "format=account")
        if shutil.which("sacctmgr") is None:
            return None
        answer = self._run(*command)
        if answer.returncode == 0:
            return sorted(set(answer.stdout.split()))
        if _NO_ACCOUNTING in answer.stderr + answer.stdout:
            return None
        raise _failed(command, answer)

    def kill_wait(self) -> int:
        output = self._ask("scontrol", "show", "config")
        match = re.search(r"^KillWait\s*=\s*(\d+)", output, re.M)
        if match is None:
            raise SchedulerError("scontrol show config: names no KillWait")
        return int(match[1])

    def test_only(self, batch_file: Path, *, nodes_down: bool = False) -> str:
        command = ("sbatch", "--test-only", str(batch_file))
        answer = self._run(*command)
        if answer.returncode == 0:
            return ""
        if NO_ANSWER.search(answer.stderr):
            raise _failed(command, answer)
        refusal = _one_line(answer) or f"sbatch: exit code {answer.returncode}"
        return "" if nodes_down and refusal == NO_SUCH_NODES else refusal

    def requeue(self, job: str) -> None:
        self._ask("scontrol", "requeue", job)

    def cancel(self, job: str) -> None:
        self._ask("scancel", job)

    def _ask(self, *command: str) -> str:
        answer = self._run(*command)
        if answer.returncode:
            raise _failed(command, answer)
        return answer.stdout

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=self._seconds,
                env=submission_environment(),
            )
        except subprocess.TimeoutExpired:
            raise SchedulerError(f"{' '.join(command)}: no answer within {self._seconds:g} s") from None
        except OSError as error:
            raise SchedulerError(f"{' '.join(command)}: {error.strerror}") from None


def parse_job(output: str) -> QueuedJob | None:
    """The job in the output of `scontrol --oneliner show job`; for a heterogeneous job its leader, the first line."""
    lines = [line for line in output.splitlines() if line.startswith("JobId=")]
    if not lines:
        return None
    leader = next((line for line in lines if _field(line, "HetJobOffset") in ("", "0")), lines[0])
    return QueuedJob(
        id=_field(leader, "JobId"),
        name=_field(leader, "JobName"),
        user=_field(leader, "UserId").partition("(")[0],
        state=_word(_field(leader, "JobState")),
        reason=_field(leader, "Reason"),
        restarts=_number(_field(leader, "Restarts")),
        comment=_field(leader, "Comment"),
        preempted=_field(leader, "PreemptTime") == _field(leader, "EndTime") != "",
        preempt_pending=_field(leader, "PreemptTime") != "",
    )


def parse_queue(output: str) -> dict[str, QueuedJob]:
    """The jobs by id in lines of `id|state|user|reason|name|comment`; for a heterogeneous job its leader (`12+0`)."""
    jobs = {}
    for line in output.splitlines():
        if line.count("|") < 5:
            raise SchedulerError(f"squeue: cannot read {line!r}")
        job, state, user, *rest = line.split("|", 5)
        leader, _, offset = job.partition("+")
        reason, name, comment = ("" if text in _NOTHING else text for text in rest)
        if offset in ("", "0"):
            jobs[leader] = QueuedJob(leader, name, user, _word(state), reason, comment=comment)
    return jobs


def _field(line: str, name: str) -> str:
    """A field of a one-line record; empty for none. A value may contain spaces and ends before the next name."""
    match = re.search(rf"(?:^|\s){name}=(.*?)(?=\s+[A-Z][\w:/&-]*=|\s*$)", line)
    value = match[1] if match else ""
    return "" if value in _NOTHING else value


def _number(text: str) -> int:
    if not text.isdecimal():
        raise SchedulerError(f"scontrol show job: names no number of restarts, but {text!r}")
    return int(text)


def _word(state: str) -> str:
    """The state without additions: `CANCELLED` for `CANCELLED by 0` or `CANCELLED+`."""
    return re.split(r"[^A-Z_]", state, maxsplit=1)[0] or "UNKNOWN"


def parse_partitions(output: str) -> list[Partition]:
    """The partitions in lines of `name|availability|time limit|nodes|gres|state of these nodes`."""
    partitions: dict[str, Partition] = {}
    for line in output.splitlines():
        if line.count("|") != 5 or not line.split("|")[3].isdecimal():
            raise SchedulerError(f"sinfo: cannot read {line!r}")
        name, availability, limit, count, gres, state = line.split("|")
        down = int(count) if state.startswith(_OUT_OF_SERVICE) else 0
        nodes = Nodes(count=int(count), gpus=parse_gpus(gres), down=down)
        known = partitions.get(name)
        if known is None:
            known = Partition(name.rstrip("*"), name.endswith("*"), availability == "up", 0, "", limit)
        kinds = (*known.kinds, nodes)
        partitions[name] = replace(known, nodes=known.nodes + nodes.count, gpus=_describe(kinds), kinds=kinds)
    return list(partitions.values())


def parse_gpus(gres: str) -> dict[str, int]:
    """A node's GPUs by kind: `{"a100": 4}` for `gpu:a100:4(S:0-1),shard:8`, and `{"": 2}` for `gpu:2`."""
    gpus: dict[str, int] = {}
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = resource.strip().split(":")
        if words[0] != "gpu":
            continue
        count = int(words.pop()) if words[-1].isdecimal() else 1
        kind = ":".join(words[1:])
        gpus[kind] = gpus.get(kind, 0) + count
    return gpus


def _describe(kinds: Iterable[Nodes]) -> str:
    """A text about the nodes' GPUs, such as `4×a100, 2×h100`."""
    texts = {f"{count}×{kind or 'GPU'}" for nodes in kinds for kind, count in nodes.gpus.items()}
    return ", ".join(sorted(texts))


def _failed(command: Iterable[str], answer: subprocess.CompletedProcess[str]) -> SchedulerError:
    message = _one_line(answer) or f"exit code {answer.returncode} without a message"
    return SchedulerError(f"{' '.join(command)}: {message}")


def _one_line(answer: subprocess.CompletedProcess[str]) -> str:
    """A command's message, without the name of the command and the word `error`."""
    message = answer.stderr.strip() or answer.stdout.strip()
    lines = [re.sub(r"^(?:\w+: )?(?:error: |allocation failure: )?", "", line.strip()) for line in message.splitlines()]
    return "; ".join(line for line in lines if line)
