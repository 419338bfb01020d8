"""A run as a user submits it to a Slurm that tests started, and what it leaves behind.

run = SlurmRun.start(slurm, tmp_path, "r", "resources.inference.nodes=1")
run.wait_for_step(7)
slurm.run("scontrol", "requeue", run.job)
assert run.wait_for_end()["JobState"] == "COMPLETED", run.output()
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig, load_config
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, Outcome, RunIdentity, SubmittedJob
from pipeline.topology.plan import NodeInfo, World
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from tests.cluster.slurm_cluster import ENDED, SlurmCluster
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import ROOT, SMALL

SUBMIT_SECONDS = 120.0
ON_SLURM = (*SMALL, "cluster=slurm", "task.processes=1")
"""One process of the task, so that two runs fit onto the nodes at a time: its CPUs are asked for."""


def launch(
    slurm: SlurmCluster,
    output: Path,
    name: str,
    *arguments: str,
    script: str = "submit.py",
    seconds: float = SUBMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """`launchers/submit.py` with a small run, from where this cluster's users log in; it need not succeed."""
    own = [*ON_SLURM, f"output={output}", f"name={name}"] if script == "submit.py" else []
    command = [sys.executable, str(ROOT / "launchers" / script), *own, *arguments]
    return subprocess.run(slurm.wrap(command), cwd=ROOT, env=slurm.env, capture_output=True, text=True, timeout=seconds)


@contextmanager
def follow(
    slurm: SlurmCluster, output: Path, name: str, *arguments: str
) -> Iterator[tuple["subprocess.Popen[str]", "SlurmRun"]]:
    """A launcher that follows the job which it has submitted; it ends with the block."""
    own = [*ON_SLURM, f"output={output}", f"name={name}"]
    process = subprocess.Popen(
        slurm.wrap([sys.executable, str(ROOT / "launchers" / "submit.py"), *own, *arguments]),
        cwd=ROOT,
        env=slurm.env | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    paths = RunPaths(output / name)
    with process:
        try:
            wait_for("the job to be submitted", paths.job.exists, WAIT_SECONDS, missing=lambda: str(process.poll()))
            yield process, SlurmRun(slurm, paths)
        finally:
            process.kill()


class SlurmRun:
    """A run and its newest job.

    Attributes:
        job: the job's id.
        said: what the launcher printed.
    """

    def __init__(self, slurm: SlurmCluster, run: RunPaths, said: str = "") -> None:
        self.slurm, self.run, self.said = slurm, run, said
        submitted = shared_files.read_document(run.job, SubmittedJob)
        assert submitted is not None, f"no job is on record in {run.root}: {said}"
        self.job = submitted.job

    @classmethod
    def start(cls, slurm: SlurmCluster, output: Path, name: str, *arguments: str) -> "SlurmRun":
        """Submit a small run and do not follow it; the same call resumes it with another job."""
        done = launch(slurm, output, name, "--detach", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return cls(slurm, RunPaths(output / name), done.stdout + done.stderr)

    @property
    def config(self) -> RunConfig:
        tree = shared_files.read_document(self.run.config, dict[str, Any])
        assert tree is not None
        return load_config(tree)

    @property
    def attempts(self) -> list[AttemptPaths]:
        """All attempts of the run so far, of all its jobs, the oldest first."""
        identity = shared_files.read_document(self.run.run, RunIdentity)
        if identity is None or not self.run.attempts.exists():
            return []
        names = [folder.name.split("-") for folder in self.run.attempts.iterdir()]
        return [
            self.run.attempt(identity.run_id, f"{job}-{restart}")
            for job, restart in sorted(names, key=lambda name: (int(name[0]), int(name[1])))
        ]

    @property
    def finished(self) -> Finished | None:
        return shared_files.read_document(self.run.finished, Finished)

    def fields(self) -> dict[str, str]:
        """What Slurm shows of the job, as JobState or Restarts."""
        return self.slurm.job(self.job)

    def has_ended(self) -> bool:
        """Whether the job is over and will not run again."""
        return self.fields()["JobState"] in ENDED

    def rows(self, kind: str = "train", job: str = "rl") -> list[dict[str, Any]]:
        return [row for row in read_rows(self.run.metrics) if row["job"] == job and row["kind"] == kind]

    def outcome(self, attempt: int = -1) -> Outcome | None:
        """What became of the job after an attempt, counted as in a list."""
        return shared_files.read_document(self.attempts[attempt].outcome, Outcome)

    def failure(self, attempt: int = -1) -> FirstFailure | None:
        return shared_files.read_document(self.attempts[attempt].first_failure, FirstFailure)

    def world(self, attempt: int = -1) -> World | None:
        """Who has which role, None while it is not published."""
        return shared_files.read_document(self.attempts[attempt].rendezvous / "world.json", World)

    def node_infos(self, attempt: int = -1) -> list[NodeInfo]:
        """The node records that are published so far, by rank."""
        found = (self.attempts[attempt].rendezvous / "nodes").glob("*.json")
        node_infos = [shared_files.read_document(path, NodeInfo) for path in found]
        return sorted(
            (node_info for node_info in node_infos if node_info is not None), key=lambda node_info: node_info.rank
        )

    def history(self, attempt: int = -1) -> list[tuple[str, str]]:
        """(role, state) of an attempt, in the order in which each rank wrote them."""
        if not self.attempts:
            return []
        lines = [line for file in self.attempts[attempt].timeline.glob("*.jsonl") for line in file.open()]
        return [(entry["role"], entry["state"]) for entry in map(json.loads, lines)]

    def wait_for(self, what: str, probe: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        """Until `probe()`; gives up, with the job's output, as soon as the job is over."""
        wait_for(what, lambda: probe() or self.has_ended(), seconds, missing=self.output, pause=0.2, longest_pause=0.5)
        assert probe(), f"the job ended while waiting for {what}: {self.output()}"

    def wait_for_attempts(self, count: int, seconds: float = 120) -> None:
        self.wait_for(f"attempt {count}", lambda: len(self.attempts) >= count, seconds)

    def wait_for_world(self, attempts: int = 1, seconds: float = 120) -> None:
        """Until the newest attempt, at least the `attempts`-th, has a world."""
        self.wait_for("a world", lambda: len(self.attempts) >= attempts and self.world() is not None, seconds)

    def wait_for_state(self, role: str, state: str, seconds: float = 120) -> None:
        """Until a role of the newest attempt was in this state."""
        self.wait_for(f"{role} {state}", lambda: (role, state) in self.history(), seconds)

    def wait_for_step(self, step: int, seconds: float = WAIT_SECONDS, job: str = "rl") -> None:
        """Until this step is on record."""
        self.wait_for(f"step {step}", lambda: any(row["step"] >= step for row in self.rows(job=job)), seconds)

    def wait_for_end(self, seconds: float = 300) -> dict[str, str]:
        """What Slurm shows of the job once it is over."""
        wait_for(f"job {self.job} to end", self.has_ended, seconds, missing=self.output, pause=0.2, longest_pause=0.5)
        return self.fields()

    def output(self) -> str:
        """What Slurm, the agents and the roles of the newest attempt said: the end of every log."""
        logs = sorted((self.run.submitit / "slurm").glob(f"{self.job}_*_log.out"))
        logs += sorted(self.attempts[-1].logs.iterdir()) if self.attempts and self.attempts[-1].logs.exists() else []
        parts = [f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        fields = self.fields()
        head = f"job {self.job}: {fields['JobState']} ({fields['Reason']}), restarts {fields['Restarts']}"
        return "\n".join([head, f"failure: {self.failure()}" if self.attempts else "no attempt", *parts])
