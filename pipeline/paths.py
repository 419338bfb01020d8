"""Every file name of a run, in one place.

Owns the layout of a run directory. Promises that all other modules ask here for a path and never spell one. Pure: makes
no directory and reads no file.

    <output>/<name>/                      the run directory
      run.json                            run_id, config digest, when and from which revision it was created
      config.json                         the resolved config, frozen
      job.json                            the job that was submitted for it last
      code/                               snapshot of the packages that every attempt runs
      submitit/                           submitit's own job folder
      rendezvous/<run_id>/<attempt>/      cards, claims and the world of one attempt
      attempts/<attempt>/                 logs/, status/, events/, adapters/, first_failure.json, outcome.json of one
                                          attempt
      redis/<attempt>/                    Redis's persistence of one attempt
      streams/                            topics as files, when they are not in Redis
      jobs/                               the trainer's jobs: sft.json, rl.json
      checkpoints/<job>-<step>/           a checkpoint; COMMIT is written last
      model/                              the exported model at the end; model.<attempt>/ until it is whole
      metrics.jsonl  ledger.jsonl  report.html  finished.json

    <output>/<name>/                      a sweep's directory
      sweep.json                          its points, and what was submitted for each
      <number>-<overrides>/               the run directory of a point
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AttemptPaths:
    """Files of one attempt (`<job id>-<restart count>`) of a run."""

    run: Path
    run_id: str
    attempt: str

    @property
    def root(self) -> Path:
        return self.run / "attempts" / self.attempt

    @property
    def rendezvous(self) -> Path:
        """Cards, claims and `world.json`: read and written by `slurm.rendezvous` and `slurm.election` only."""
        return self.run / "rendezvous" / self.run_id / self.attempt

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, role: str, rank: int) -> Path:
        """Standard output and error of a role on a rank."""
        return self.logs / f"{role}.{rank}.log"

    @property
    def events(self) -> Path:
        """One file an event, each written once: see `pipeline.events`."""
        return self.root / "events"

    def status(self, name: str) -> Path:
        """Latest state of a role or an agent, replaced atomically by its one writer."""
        return self.root / "status" / f"{name}.json"

    @property
    def timeline(self) -> Path:
        """A folder with one JSONL file per rank: when each role changed state."""
        return self.root / "timeline"

    def down(self, placement: str) -> Path:
        """Marks that a role is down, so that those it depended on may follow."""
        return self.root / "down" / placement

    @property
    def first_failure(self) -> Path:
        return self.root / "first_failure.json"

    @property
    def outcome(self) -> Path:
        """What became of the job after this attempt (`pipeline.records.Outcome`)."""
        return self.root / "outcome.json"

    @property
    def alive(self) -> Path:
        """A folder with one file per rank, touched as long as its agent lives."""
        return self.root / "alive"

    def adapters(self, placement: str) -> Path:
        """A server's own folder for the adapter that it serves."""
        return self.root / "adapters" / placement

    @property
    def redis(self) -> Path:
        return self.run / "redis" / self.attempt


@dataclass(frozen=True)
class RunPaths:
    """Files of a run that outlive its attempts."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def lock(self) -> Path:
        return self.root / "live.lock"

    @property
    def job_lock(self) -> Path:
        return self.root / "job.lock"

    @property
    def submitit(self) -> Path:
        return self.root / "submitit"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def jobs(self) -> Path:
        """The folder of the trainer's jobs."""
        return self.root / "jobs"

    def training_job(self, name: str) -> Path:
        """The file of one of them: `sft` or `rl`."""
        return self.jobs / f"{name}.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def tracking(self) -> Path:
        """wandb's own files."""
        return self.root / "tracking"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def finished(self) -> Path:
        return self.root / "finished.json"

    def attempt(self, run_id: str, attempt: str) -> AttemptPaths:
        return AttemptPaths(self.root, run_id, attempt)


@dataclass(frozen=True)
class SweepPaths:
    """Files of a sweep; the run directories of its points are below it."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "sweep.json"

    @property
    def lock(self) -> Path:
        return self.root / "sweep.lock"

    def point(self, name: str) -> RunPaths:
        return RunPaths(self.root / name)
