"""The post-mortem of an attempt: one archive for a bug report, without secrets.

Owns what the archive contains, its bounds, and that each text passes `pipeline.utils.redaction` first. Host names,
paths and the run's configuration stay. Samples, prompts, weights, `world.json` and `api/` are never included. A file
that is missing, damaged or too large costs only itself: `README.txt` lists what was left out and why.

    write_postmortem(paths)      # the path of attempts/<attempt>/postmortem.tar.gz
"""

import glob
import gzip
import io
import json
import os
import re
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipeline.observability.failure_verdict import Verdict, verdict_of
from pipeline.observability.installed_versions import describe_versions
from pipeline.observability.number_format import moment
from pipeline.observability.run_history import Attempt, read_attempt
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import WORLD, AttemptPaths, RunPaths
from pipeline.topology.plan import NodeInfo, World
from pipeline.utils import shared_files
from pipeline.utils.node_facts import finish_within
from pipeline.utils.private_files import open_private
from pipeline.utils.redaction import Redactor, local_secrets

LOG_LINES = 200
LINE_CHARACTERS = 2000
TAIL_BYTES = 1 << 18
"""Bytes at the end of a log from which its last lines are taken."""
STACK_BYTES = 1 << 20
"""Bytes at the end of a log in which the stacks of a hung role are searched."""
MAX_BYTES = 8 << 20
"""Most bytes of text in the archive, before compression."""
MAX_LOGS = 200
AUTOMATIC_SECONDS = 20.0
"""Longest wait of a command that ends anyway for the archive of its failure."""
_STACKS = re.compile(r"^Stacks of process \d+, whose role hangs:$", re.MULTILINE)
_ROWS = 20


@dataclass
class _Bundle:
    """The texts of an archive. `add` removes secrets, cuts long lines, and keeps to the archive's bound."""

    redactor: Redactor
    texts: dict[str, str] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)
    _bytes: int = 0

    def cleaned(self, text: str) -> str:
        """The text without secrets and with bounded lines. A cut may leave no part of a secret, so it comes second."""
        lines = self.redactor.redact(text).splitlines()
        return "".join(
            f"{line}\n" if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} …\n" for line in lines
        )

    def add(self, name: str, text: str) -> None:
        text = self.cleaned(text)
        size = len(text.encode(errors="replace"))
        if self._bytes + size > MAX_BYTES:
            self.omitted.append(f"{name}: the archive has its {MAX_BYTES >> 20} MiB")
            return
        self._bytes += size
        self.texts[name] = text

    def add_file(self, name: str, path: Path, size: int = TAIL_BYTES) -> None:
        """Add the end of a file; a file that cannot be read is listed as left out."""
        try:
            self.add(name, "\n".join(read_end(path, size).splitlines()[-LOG_LINES:]))
        except FileNotFoundError:
            self.omitted.append(f"{name}: missing")
        except OSError as error:
            self.omitted.append(f"{name}: {error.strerror or error}")

    def add_document(self, name: str, path: Path) -> None:
        """Add a sealed document as indented JSON. A damaged one is listed as left out."""
        try:
            body = shared_files.unseal(path.read_bytes())
            document = json.loads(body) if body is not None else None
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self.omitted.append(f"{name}: {error}")
            return
        if body is None:
            self.omitted.append(f"{name}: damaged")
        else:
            self.add(name, json.dumps(document, indent=1))


def write_postmortem(paths: AttemptPaths) -> Path:
    """Write the archive of an attempt, and return its path: in the attempt's directory, or where temporary files are
    if the disk of the run takes none. `OSError` if neither does."""
    attempt = read_attempt(paths)
    texts = collect(attempt)
    data = _pack(f"{paths.run.name}-{paths.attempt}", texts)
    try:
        shared_files.write_atomic(paths.postmortem, data)
    except OSError:
        elsewhere = Path(tempfile.gettempdir(), f"rollcall-postmortem-{paths.run.name}-{paths.attempt}.tar.gz")
        elsewhere.unlink(missing_ok=True)  # a link that another user made there must not be followed
        with open(elsewhere, "xb", opener=open_private) as file:
            file.write(data)
        return elsewhere
    return paths.postmortem


def postmortem_of(paths: AttemptPaths) -> Path | None:
    """The archive of a failed attempt, written now unless it exists; None if it cannot be written soon.

    For a process that ends with its exit code whatever becomes of the archive: raises nothing, and waits at most
    `AUTOMATIC_SECONDS`.
    """
    return finish_within(
        AUTOMATIC_SECONDS, lambda: paths.postmortem if paths.postmortem.exists() else write_postmortem(paths)
    )


def collect(attempt: Attempt) -> dict[str, str]:
    """The texts of the archive by their names, the most important first."""
    paths, run = attempt.paths, RunPaths(attempt.paths.run)
    bundle = _Bundle(Redactor([*_secrets_of(attempt), *local_secrets()]))
    verdict = verdict_of(attempt, time.time())
    for document in (paths.first_failure, paths.outcome, run.run, run.job, run.config):
        bundle.add_document(document.name, document)
    events = (f"{_clock(event.time)} {event.name}: {event.why}" for event in attempt.events.values())
    bundle.add("events.txt", "\n".join(events))
    bundle.add("timeline.txt", _timeline(attempt))
    bundle.add("versions.txt", describe_versions())
    logs = _logs(attempt)
    for log in logs[:MAX_LOGS]:
        bundle.add_file(f"logs/{log.name}", log)
        with suppress(OSError):
            text = read_end(log, STACK_BYTES)
            if match := _STACKS.search(text):
                bundle.add(f"stacks/{log.stem}.txt", text[match.start() :])
    records = sorted(paths.node_reports.glob("[!.]*.txt"), key=lambda path: (not _failed_on(attempt, path), path.name))
    for record in records[:MAX_LOGS]:
        bundle.add_file(f"nodes/{record.name}", record)
    for output in _agent_outputs(run, paths)[:MAX_LOGS]:
        bundle.add_file(f"agents/{output.name}", output)
    rows = read_rows(run.metrics)[-_ROWS:] if run.metrics.exists() else []
    bundle.add(run.metrics.name, "\n".join(msgspec.json.encode(row).decode() for row in rows))
    if len(logs) > MAX_LOGS:
        bundle.omitted.append(f"{len(logs) - MAX_LOGS} more logs in {paths.logs}")
    return {"README.txt": bundle.cleaned(_readme(attempt, verdict, bundle.texts, bundle.omitted)), **bundle.texts}


def read_end(path: Path, size: int) -> str:
    """The whole lines in the last `size` bytes of a regular file. `OSError` for anything else: a pipe would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        skipped = max(0, status.st_size - size)
        file.seek(skipped)
        text = file.read(size).decode(errors="replace")
    # A part of a line may begin within a secret, which the redactor then would not recognize.
    return text.partition("\n")[2] if skipped else text


def _pack(folder: str, texts: dict[str, str]) -> bytes:
    """A .tar.gz with these files in a folder, readable by their owner only."""
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb") as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name, text in texts.items():
            content = text.encode(errors="replace")
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def _secrets_of(attempt: Attempt) -> Iterator[str]:
    """The secrets that this run made: of all its attempts, since a log may quote an earlier one, and of its API."""
    run = RunPaths(attempt.paths.run)
    for world_file in run.rendezvous.glob(f"*/*/{WORLD}"):
        world = shared_files.read_document(world_file, World)
        if world is not None:
            yield from (world.secret, world.password)
    for record in run.rendezvous.glob("*/*/*.json"):
        node = shared_files.read_document(record, NodeInfo)
        if node is not None:
            yield node.token
    # The key of the API's clients, and the gateway's address with the secret that the trainer sends.
    for file in run.api.glob("*.json"):
        yield str((shared_files.read_document(file, dict[str, Any]) or {}).get("secret", ""))
    with suppress(OSError):
        yield (run.api / "key").read_text().strip()


def _logs(attempt: Attempt) -> list[Path]:
    """The roles' logs: those of the failed role first, then by name."""
    failed = attempt.failure.role if attempt.failure else ""
    return sorted(attempt.paths.logs.glob("*.log"), key=lambda log: (log.stem != failed, log.name))


def _agent_outputs(run: RunPaths, paths: AttemptPaths) -> list[Path]:
    """The output of the attempt's agents, and on Slurm of its batch script."""
    job = glob.escape(paths.job)
    patterns = (f"{job}/*_log.*", f"*/{job}_*_log.*") if job else ()
    return sorted(path for pattern in patterns for path in run.submitit.glob(pattern))


def _failed_on(attempt: Attempt, record: Path) -> bool:
    return attempt.failure is not None and record.stem == str(attempt.failure.rank)


def _timeline(attempt: Attempt) -> str:
    return "\n".join(
        f"{_clock(line.time)} {line.role} on rank {line.rank}: {line.state} {line.detail}".rstrip()
        for line in attempt.transitions[-LOG_LINES:]
    )


def _readme(attempt: Attempt, verdict: Verdict, texts: dict[str, str], omitted: list[str]) -> str:
    failure = attempt.failure
    states = attempt.states
    beats = [
        f"  agent.{rank}: {_clock(beat)} (its file alive/{rank}; it left no exit marker)"
        for rank, beat in attempt.alive.items()
    ]
    reports = [
        f"  {name}: {_clock(status.time)} {status.state} {status.detail}".rstrip()
        + (f"; its agent at {_clock(states[name].time)}: {states[name].state}" if name in states else "")
        for name, status in attempt.statuses.items()
    ]
    lines = [
        f"Post-mortem of attempt {attempt.name} of {attempt.paths.run}, written {_clock(time.time())} UTC",
        "",
        f"Verdict: {verdict}",
        "",
        f"First failure: {f'{failure.role} on rank {failure.rank} at {_clock(failure.time)}' if failure else 'none'}",
        "",
        "Last report of each role (nodes/ has the last tick and the last progress of each process):",
        *(reports or ["  none"]),
        *beats,
        "",
        f"Files (logs: the last {LOG_LINES} lines). Secrets are replaced by [removed]; look yourself before you attach",
        "the archive to a public report, since a log may quote your prompts and data.",
        *(f"  {name}" for name in texts),
        "",
        "Left out:",
        *(f"  {line}" for line in omitted or ["nothing"]),
    ]
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    """A time in UTC, with tenths of a second."""
    date = moment(seconds, "%Y-%m-%d %H:%M:%S")
    return date if date == "—" else f"{date}.{int(seconds * 10) % 10}"
