"""Every file name of a run, in one place.

Owns the layout of a run directory. Promises that no other module spells the name of a file or folder that is listed
here. What lies inside a folder that one module owns (cards and claims, a checkpoint, streams, Redis's data, submitit's
jobs) is named by that module. Pure: makes no directory and reads no file.

    <output>/<name>/                      the run directory
      run.json                            run_id, config digest, when and from which revision it was created
      config.json                         the resolved config, frozen
      job.json                            the job that was submitted for it last
      code/                               snapshot of the packages that every attempt runs
      submitit/                           submitit's own job folder
      rendezvous/<run_id>/<attempt>/      cards, claims and the world of one attempt
      attempts/<attempt>/                 logs/, status/, events/, down/, alive/, timeline/, adapters/,
                                          first_failure.json, outcome.json, committed, exhausted of one attempt
      redis/<attempt>/                    Redis's persistence of one attempt
      streams/                            topics as files, when they are not in Redis
      api/                                of a run that serves: address, key, store and weights of its clients
      jobs/                               the trainer's jobs: sft.json, rl.json; of a run that does the jobs of files,
                                          state-<digest>.json for each optimizer_state with a checkpoint of its own
      checkpoints/<job>-<step>/<attempt>/ a checkpoint; COMMIT is written last
      model/                              the exported model at the end; .model.part-<attempt>/ until it is whole
      exports/<job>-<step>/               a commit as a model, made to be evaluated
      best/                               of SFT, the model of the lowest held-out loss so far, in the same way
      tracking/                           wandb's own files
      aside/<number>/                     what was there when the run was started over (resume=scratch), or rows that
                                          only a damaged checkpoint covered
      live.lock  job.lock                 held by its launcher, and by its job for as long as that runs
      rollouts/train/  rollouts/eval/     samples that are kept to be read
      metrics.jsonl  ledger.jsonl  report.html  finished.json
      evaluation.json  benchmark/         of a run that evaluates alone: what it found, and what its command wrote

    <output>/<name>/                      a sweep's directory
      sweep.json                          its points, and what was submitted for each
      sweep.lock                          held by the launcher that submits them
      <number>-<overrides>/               the run directory of a point
"""

from dataclasses import dataclass
from pathlib import Path

RUN, SWEEP, METRICS, CHECKPOINTS, MODEL = "run.json", "sweep.json", "metrics.jsonl", "checkpoints", "model"
CONFIG, WORLD = "config.json", "world.json"
RENDEZVOUS = "rendezvous"
EVENTS, DOWN, FIRST_FAILURE = "events", "down", "first_failure.json"
COMMITTED, EXHAUSTED = "committed", "exhausted"
"""Names below an attempt's own directory for those who see it as a `pipeline.utils.shared_dir.SharedDir`."""


_TIMELINE, _LINES = "rank-", ".jsonl"


def rank_of_timeline(name: str) -> int | None:
    """The rank whose timeline has this name; None if it is no timeline's."""
    number = name.removeprefix(_TIMELINE).removesuffix(_LINES)
    return int(number) if name == f"{_TIMELINE}{number}{_LINES}" and number.isdecimal() else None


def down_mark(name: str) -> str:
    """The mark of a role (`trainer.0`) or an agent (`agent.3`) that is down, below the attempt's directory."""
    return f"{DOWN}/{name}"


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
        """Cards, claims and `world.json`: read and written by `slurm/rendezvous/` only."""
        return self.run / RENDEZVOUS / self.run_id / self.attempt

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def world(self) -> Path:
        """The assignment of the attempt's roles, which its leader published."""
        return self.rendezvous / WORLD

    def log(self, role: str, rank: int) -> Path:
        """Standard output and error of a role on a rank."""
        return self.logs / f"{role}.{rank}.log"

    @property
    def events(self) -> Path:
        """One file an event, each written once: see `pipeline.run.events`."""
        return self.root / EVENTS

    @property
    def statuses(self) -> Path:
        """A folder with one file a role: its latest state."""
        return self.root / "status"

    def status(self, name: str) -> Path:
        """Latest state of a role, replaced atomically by its one writer."""
        return self.statuses / f"{name}.json"

    @property
    def timeline(self) -> Path:
        """A folder with one JSONL file per rank: when each role changed state."""
        return self.root / "timeline"

    def timeline_of(self, rank: int) -> Path:
        return self.timeline / f"{_TIMELINE}{rank}{_LINES}"

    @property
    def marks(self) -> Path:
        """A folder with one file for each role and agent that is down."""
        return self.root / DOWN

    def down(self, placement: str) -> Path:
        """Marks that a role or an agent is down, so that those it depended on may follow."""
        return self.root / down_mark(placement)

    @property
    def first_failure(self) -> Path:
        return self.root / FIRST_FAILURE

    @property
    def outcome(self) -> Path:
        """What became of the job after this attempt (`pipeline.run.run_documents.Outcome`)."""
        return self.root / "outcome.json"

    @property
    def checkpointed(self) -> Path:
        """A mark: this attempt has committed, wherever the run, or the job of `training.jobs`, keeps that."""
        return self.root / COMMITTED

    @property
    def exhausted(self) -> Path:
        """A mark: of `training.jobs` only such are left as failed, or wait for one that did."""
        return self.root / EXHAUSTED

    @property
    def alive(self) -> Path:
        """A folder with one file per rank, touched as long as its agent lives."""
        return self.root / "alive"

    def sign_of_life(self, rank: int) -> Path:
        return self.alive / str(rank)

    def adapters(self, placement: str) -> Path:
        """A server's own folder for the adapter that it serves."""
        return self.root / "adapters" / placement

    @property
    def redis(self) -> Path:
        return self.run / "redis" / self.attempt

    @property
    def shared(self) -> tuple[Path, ...]:
        """The folders in which ranks look for what others write."""
        return self.rendezvous, self.events, self.marks, self.statuses, self.alive, self.timeline, self.logs


@dataclass(frozen=True)
class RunPaths:
    """Files of a run that outlive its attempts."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / RUN

    @property
    def config(self) -> Path:
        return self.root / CONFIG

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
    def rendezvous(self) -> Path:
        """A folder with one folder of all attempts, named by the run_id."""
        return self.root / RENDEZVOUS

    @property
    def aside(self) -> Path:
        """What was there when the run was started over, or went back past a damaged checkpoint: a numbered folder each
        time."""
        return self.root / "aside"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    @property
    def checkpoints(self) -> Path:
        return self.root / CHECKPOINTS

    @property
    def api(self) -> Path:
        """The folder of a run that serves (`pipeline.tinker.gateway_settings`)."""
        return self.root / "api"

    @property
    def jobs(self) -> Path:
        """The folder of the trainer's jobs."""
        return self.root / "jobs"

    def training_job(self, name: str) -> Path:
        """The file of one of them: `sft` or `rl`."""
        return self.jobs / f"{name}.json"

    def job_state(self, digest: str) -> Path:
        """The record of an `optimizer_state` that a job of a file has a checkpoint in."""
        return self.jobs / f"state-{digest}.json"

    @property
    def model(self) -> Path:
        return self.root / MODEL

    @property
    def best(self) -> Path:
        """The model of SFT's lowest held-out loss."""
        return self.root / "best"

    @property
    def exports(self) -> Path:
        """The folder of commits that were written as models."""
        return self.root / "exports"

    @property
    def evaluation(self) -> Path:
        """What a run that evaluates alone found."""
        return self.root / "evaluation.json"

    @property
    def benchmark(self) -> Path:
        """Where the command of such a run works."""
        return self.root / "benchmark"

    @property
    def rollouts(self) -> Path:
        """The folder of the samples that are kept to be read (`pipeline.rollout.sample_store`)."""
        return self.root / "rollouts"

    @property
    def metrics(self) -> Path:
        return self.root / METRICS

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
        return self.root / SWEEP

    @property
    def lock(self) -> Path:
        return self.root / "sweep.lock"

    def point(self, name: str) -> RunPaths:
        return RunPaths(self.root / name)
