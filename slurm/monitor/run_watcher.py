"""Reading a run's state from its files, and from its scheduler if the files are inconclusive.

Owns what is read how often. Promises that it only reads, that it works at any time and on any machine with access to
the run directory, and that it works without an answer of the scheduler.
"""

import time
from dataclasses import replace
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError, SchedulerError
from pipeline.observability.run_history import Attempt, AttemptReader, attempt_names
from pipeline.run.completion import is_finished
from pipeline.run.metrics_log import MetricRecord, RowReader
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import RunIdentity, SubmittedJob
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK, Clock
from slurm.monitor.attached_lines import AttachedLines
from slurm.monitor.run_snapshot import JobLine, PastAttempt, Snapshot, compose_snapshot, condense, past_of
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import Connect

ASK_SECONDS = 10.0
"""Seconds between two queries to the scheduler, at least."""


class Watcher:
    """Takes snapshots of one run. It reads each metrics row and each ended attempt only once.

    `AttemptReader` reads the newest attempt incrementally.
    """

    def __init__(
        self,
        root: Path,
        attempt: str = "",
        connect: Connect | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        """`attempt` is the attempt to read, also before it exists; empty: always the newest.

        The scheduler, by `connect`, is queried for the run's job if the files do not show whether the job continues. An
        error of the scheduler becomes part of the snapshot.
        """
        self._run, self._attempt = RunPaths(root), attempt
        self._reader = RowReader(self._run.metrics)
        self._rows: list[MetricRecord] = []
        self._newest = -1
        """The index of the newest training row, which alone is whole."""
        self._attached = AttachedLines(self._run)
        self._config: RunConfig | None = None
        self._over: dict[str, PastAttempt] = {}
        self._readers: dict[str, AttemptReader] = {}
        self._began: dict[str, float] = {}
        self._connect, self._clock = connect, clock
        self._answered: tuple[float, JobLine] | None = None
        """The time of the last query to the scheduler, and its result."""

    def look(self, live: bool | None = None) -> Snapshot:
        """The current snapshot of the run; `live` as in `read_snapshot`."""
        self._read_rows()
        self._config = self._config or read_frozen_config(self._run)
        submitted = shared_files.read_document(self._run.job, SubmittedJob)
        job = JobLine(submitted.job, submitted.kind, live=live) if submitted and submitted.queued else None
        names = attempt_names(self._run, self._began)
        name = self._attempt or next(reversed(names), "")
        attempt = self._read(name) if name else None
        past = [self._past(other) for other in names if other != name]
        attached = self._attached.look(name, time.time()) if name else ()
        finished, alive = is_finished(self._run), run_registry.is_live_here(self._run) if job is None else None

        def composed(job: JobLine | None) -> Snapshot:
            return compose_snapshot(
                self._run.root.name,
                attempt,
                self._rows,
                self._config,
                past=past,
                submitted=submitted,
                finished=finished,
                alive=alive if job is None else job.live,
                job=job,
                now=time.time(),
                attached=attached,
            )

        now = composed(job)
        return composed(self._ask(now.job)) if now.job and now.is_inconclusive else now

    def _read_rows(self) -> None:
        """Read the new rows. A launcher follows a run for days, so it keeps little of each."""
        new = self._reader.read()
        if self._reader.is_first:
            self._rows, self._newest = [], -1
        for row in new:
            if row["kind"] == "train":
                if self._newest >= 0:
                    self._rows[self._newest] = condense(self._rows[self._newest])
                self._newest = len(self._rows)
            self._rows.append(row if row["kind"] == "train" else condense(row))

    def _read(self, name: str) -> Attempt:
        if name not in self._readers:
            identity = shared_files.read_document(self._run.run, RunIdentity)
            reader = AttemptReader(self._run.attempt(identity.run_id if identity else "unknown", name))
            if identity is None:
                return reader.read()
            self._readers[name] = reader
        return self._readers[name].read()

    def _past(self, name: str) -> PastAttempt:
        if name not in self._over:
            self._readers.pop(name, None)  # read the whole attempt once more: it may have got last records
            self._over[name] = past_of(self._read(name))
            self._readers.pop(name, None)
        return self._over[name]

    def _ask(self, job: JobLine) -> JobLine:
        """The job with the scheduler's state, which is at most `ASK_SECONDS` old."""
        if self._connect is None:
            return job
        when, answer = self._answered or (0.0, None)
        if answer is None or answer.id != job.id or self._clock.now() - when >= ASK_SECONDS:
            answer = self._query(job, self._connect)
            self._answered = self._clock.now(), answer
        return replace(job, live=answer.live, word=answer.word, trouble=answer.trouble)

    def _query(self, job: JobLine, connect: Connect) -> JobLine:
        try:
            queued = connect(job.scheduler).job(job.id)
        except (SchedulerError, ConfigError) as error:
            return replace(job, trouble=str(error))
        if queued is None or not run_registry.is_job_of(self._run, queued):
            return replace(job, live=False)
        return replace(job, live=queued.live, word=queued.word)


def read_snapshot(run_dir: Path, live: bool | None = None) -> Snapshot:
    """The current snapshot of a run and its newest attempt, from its files.

    `live` is the scheduler's answer whether the run's job runs or may run again; None without an answer.
    """
    return Watcher(run_dir).look(live)
