"""Slurm's own commands as a `Scheduler`.

Owns how sbatch, scontrol, sinfo, sacctmgr and scancel are called, and how their answers are read. Promises that every
call has a deadline and no shell, and that whatever goes wrong is a `SchedulerError` of one line with the command and
what it said. Reads explicit formats and named fields only, since the rest differs among versions. Must not know runs.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil

from pipeline.errors import ConfigError, SchedulerError
from slurm.scheduler import Nodes, Partition, QueuedJob

COMMANDS = ("sbatch", "scontrol", "sinfo", "scancel")
"""What a machine must have to submit; `sacctmgr` is asked only about accounts."""

CALL_SECONDS = 60.0
"""Slurm's commands give up on a silent controller after 10 to 20 s by themselves."""

_UNKNOWN_JOB = "Invalid job id specified"
_NO_ACCOUNTING = "not running a supported accounting_storage"
_NO_ANSWER = re.compile(r"timed out|unable to contact|connection refused|communication|unexpected message", re.I)
_OUT_OF_SERVICE = ("down", "drain", "fail", "error", "unknown", "inval", "block")
"""How the states of nodes begin that take no job until somebody mends them."""


def find_slurm(seconds: float = CALL_SECONDS) -> "SlurmCommands":
    """Slurm's commands on this machine, each with this deadline, or `ConfigError` where they are missing."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        mend = f"{', '.join(missing)} not found: log in to a node of the cluster, or set cluster=local"
        raise ConfigError("cluster.kind", "slurm", "Slurm's commands on PATH", mend)
    return SlurmCommands(seconds)


class SlurmCommands:
    """A `Scheduler` that runs one command for each question; `seconds` is the deadline of each."""

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

    def partitions(self) -> list[Partition]:
        return parse_partitions(self._ask("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%T"))

    def accounts(self) -> list[str] | None:
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={my_name()}", "format=account")
        if shutil.which("sacctmgr") is None:
            return None
        answer = self._run(*command)
        if answer.returncode == 0:
            return sorted(set(answer.stdout.split()))
        if _NO_ACCOUNTING in answer.stderr + answer.stdout:
            return None
        raise _failed(command, answer)

    def kill_wait(self) -> int:
        said = self._ask("scontrol", "show", "config")
        found = re.search(r"^KillWait\s*=\s*(\d+)", said, re.M)
        if found is None:
            raise SchedulerError("scontrol show config: names no KillWait")
        return int(found[1])

    def try_out(self, batch_file: Path) -> str:
        command = ("sbatch", "--test-only", str(batch_file))
        answer = self._run(*command)
        if answer.returncode == 0:
            return ""
        if _NO_ANSWER.search(answer.stderr):
            raise _failed(command, answer)
        return _one_line(answer) or f"sbatch ended with {answer.returncode}"

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
            )
        except subprocess.TimeoutExpired:
            raise SchedulerError(f"{' '.join(command)}: no answer within {self._seconds:g} s") from None
        except OSError as error:
            raise SchedulerError(f"{' '.join(command)}: {error.strerror}") from None


def my_name() -> str:
    """The name of the user of this process, or its number where it has none."""
    return psutil.Process().username()


def parse_job(said: str) -> QueuedJob | None:
    """The job in what `scontrol --oneliner show job` said; of a heterogeneous job its leader, which comes first."""
    lines = [line for line in said.splitlines() if line.startswith("JobId=")]
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
        making_room=_field(leader, "PreemptTime") != "",
    )


def _field(line: str, name: str) -> str:
    """A field of a one-line record; empty for none. Values may hold spaces: one ends where the next name begins."""
    found = re.search(rf"(?:^|\s){name}=(.*?)(?=\s+[A-Z][\w:/&-]*=|\s*$)", line)
    value = found[1] if found else ""
    return "" if value in ("(null)", "None", "N/A") else value


def _number(text: str) -> int:
    if not text.isdecimal():
        raise SchedulerError(f"scontrol show job: names no number of restarts, but {text!r}")
    return int(text)


def _word(state: str) -> str:
    """`CANCELLED` of `CANCELLED by 0` or `CANCELLED+`."""
    return re.split(r"[^A-Z_]", state, maxsplit=1)[0] or "UNKNOWN"


def parse_partitions(said: str) -> list[Partition]:
    """The partitions in lines of `name|availability|time limit|nodes|gres|state of these nodes`."""
    partitions: dict[str, Partition] = {}
    for line in said.splitlines():
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
    """GPUs of a node by kind: `{"a100": 4}` of `gpu:a100:4(S:0-1),shard:8`, and `{"": 2}` of `gpu:2`."""
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
    """`4×a100, 2×h100`: what GPUs its nodes have."""
    found = {f"{count}×{kind or 'GPU'}" for nodes in kinds for kind, count in nodes.gpus.items()}
    return ", ".join(sorted(found))


def _failed(command: Iterable[str], answer: subprocess.CompletedProcess[str]) -> SchedulerError:
    said = _one_line(answer) or f"ended with {answer.returncode} and said nothing"
    return SchedulerError(f"{' '.join(command)}: {said}")


def _one_line(answer: subprocess.CompletedProcess[str]) -> str:
    """What a command said, without the name of the command and the word `error`."""
    said = answer.stderr.strip() or answer.stdout.strip()
    lines = [re.sub(r"^(?:\w+: )?(?:error: |allocation failure: )?", "", line.strip()) for line in said.splitlines()]
    return "; ".join(line for line in lines if line)
