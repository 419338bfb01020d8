"""The servers of attached jobs that serve an attempt now, as lines of its snapshot.

Owns which of them are shown: those of nodes whose agent runs. A node that has left, or was killed, is not shown.
"""

from dataclasses import replace

from pipeline.observability.run_history import AttemptReader
from pipeline.observability.run_status import SILENT_SECONDS
from pipeline.run.paths import AttemptPaths, RunPaths
from slurm.monitor.run_snapshot import RoleLine, role_lines
from slurm.registry.attached_jobs import attached_jobs


class AttachedLines:
    """Reads the attached nodes of one run. Each node's timeline is read incrementally."""

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        self._readers: dict[AttemptPaths, AttemptReader] = {}

    def look(self, attempt: str, now: float) -> tuple[RoleLine, ...]:
        """The servers of an attempt, in the order in which their jobs were attached."""
        attempts = [
            (job.number, AttemptPaths(job.root, "", folder.name))
            for job in attached_jobs(self._run)
            for folder in sorted(job.attempts.glob(f"{attempt}.*"))
        ]
        self._readers = {paths: self._readers.get(paths) or AttemptReader(paths) for _, paths in attempts}
        return tuple(line for number, paths in attempts for line in self._lines(number, self._readers[paths], now))

    def _lines(self, number: int, reader: AttemptReader, now: float) -> tuple[RoleLine, ...]:
        node = reader.read()
        if not any(now - last <= SILENT_SECONDS for last in node.alive.values()):
            return ()
        return tuple(replace(line, attached=number) for line in role_lines(node, {}))
