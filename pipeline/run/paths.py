"""Every file name of a run, in one place.

Owns the layout of a run directory. Promises that no other module spells the name of a file or folder that is listed
here. A folder with a single owner (node records and claims, a checkpoint, streams, Redis's data, submitit's jobs) has
names that its owner's module defines. Pure: creates no directory and reads no file.

    <output>/<name>/                      the run directory
      run.json                            run_id, config digest, time and git revision of its creation
      config.json                         the resolved config, frozen
      job.json                            the job that was submitted for it last
      code/                               snapshot of the packages that every attempt runs
      submitit/                           submitit's job folder
      rendezvous/<run_id>/<attempt>/      node records, claims and the world of one attempt
      attempts/<attempt>/                 logs/, status/, events/, notices/, down/, alive/, timeline/, adapters/,
                                          traces/, servers/, dropped/, nodes/, first_failure.json, outcome.json,
                                          committed, exhausted, all_exited, postmortem.tar.gz of one attempt
      redis/<attempt>/                    Redis's persistence of one attempt
      streams/                            topics as files, when they are not in Redis
      api/                                in a run that serves: address, key, store and weights of its clients
      jobs/                               the trainer's jobs: sft.json, rl.json; in a run that executes job files,
                                          state-<digest>.json for each optimizer_state with a separate checkpoint
      checkpoints/<job>-<step>/<attempt>/ a checkpoint; COMPLETE is written last
      model/                              the exported model at the end; .model.part-<attempt>/ until it is complete
      exports/<job>-<step>/               a checkpoint exported as a model, for an evaluation
      best/                               in SFT, the model with the lowest held-out loss so far, in the same way
      tracking/                           files of trackers
      aside/<number>/                     the previous contents after resume=scratch, or rows that only a damaged
                                          checkpoint covered
      live.lock  job.lock                 held by its launcher, and by its job while the job runs
      attached/<number>/                  a job that serves the run in addition to its own: run.json, config.json,
                                          job.json, job.lock, submitit/, rendezvous/ and attempts/ as those of a run
      rollouts/train/  rollouts/eval/     samples that are saved for inspection
      episodes/                           the journal of episodes in flight
      curriculum/                         the prompts that a curriculum chose for each window of positions
      metrics.jsonl  ledger.jsonl  report.html  finished.json
      evaluation.json  benchmark/         in a run that only evaluates: its results, and the files of its command

    <output>/<name>/                      a sweep's directory
      sweep.json                          its points, and the submissions of each
      sweep.lock                          held by the launcher that submits them
      <number>-<overrides>/               the run directory of a point
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RUN, SWEEP, METRICS, CHECKPOINTS, MODEL = "run.json", "sweep.json", "metrics.jsonl", "checkpoints", "model"
CONFIG, WORLD = "config.json", "world.json"
RENDEZVOUS = "rendezvous"
ATTACHED = "attached"
EVENTS, DOWN, FIRST_FAILURE = "events", "down", "first_failure.json"
COMMITTED, EXHAUSTED, ALL_EXITED = "committed", "exhausted", "all_exited"
"""Names below an attempt's directory, for code that accesses it as a `pipeline.utils.shared_dir.SharedDir`."""


_TIMELINE, _LINES = "rank-", ".jsonl"


def rank_of_timeline(name: str) -> int | None:
    """The rank whose timeline has this name; None if the name is no timeline's."""
    number = name.removeprefix(_TIMELINE).removesuffix(_LINES)
    return int(number) if name == f"{_TIMELINE}{number}{_LINES}" and number.isdecimal() else None


def down_mark(name: str) -> str:
    """The mark of a role (`trainer.0`) or an agent (`agent.3`) that has stopped, below the attempt's directory."""
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
    def job(self) -> str:
        return self.attempt.rpartition("-")[0]

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
        """One file per event, each written once: see `pipeline.run.events`."""
        return self.root / EVENTS

    @property
    def notices(self) -> Path:
        """A folder with one JSONL file per publisher: what happened and did not end the attempt."""
        return self.root / "notices"

    @property
    def statuses(self) -> Path:
        """A folder with one file per role: its latest state."""
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
        """A folder with one file per stopped role and agent."""
        return self.root / DOWN

    def down(self, placement: str) -> Path:
        """The mark that a role or an agent has stopped, so that the roles it depended on may stop next."""
        return self.root / down_mark(placement)

    @property
    def first_failure(self) -> Path:
        return self.root / FIRST_FAILURE

    @property
    def outcome(self) -> Path:
        """The decision about the job after this attempt (`pipeline.run.run_documents.Outcome`)."""
        return self.root / "outcome.json"

    @property
    def checkpointed(self) -> Path:
        """A mark: this attempt has saved a checkpoint, of the run or of a job file."""
        return self.root / COMMITTED

    @property
    def exhausted(self) -> Path:
        """A mark: all remaining job files of `training.jobs` have failed, or wait for a failed one."""
        return self.root / EXHAUSTED

    @property
    def alive(self) -> Path:
        """A folder with one file per rank, touched while its agent runs."""
        return self.root / "alive"

    def sign_of_life(self, rank: int) -> Path:
        return self.alive / str(rank)

    @property
    def joined_servers(self) -> Path:
        """A folder with one record per server that joined the attempt and serves it (`pipeline.run.joined_servers`)."""
        return self.root / "servers"

    def adapters(self, placement: str) -> Path:
        """The folder of a server for the adapter that it serves."""
        return self.root / "adapters" / placement

    @property
    def traces(self) -> Path:
        """The folder of the trainer's profiles and memory snapshots (`debug.profile_steps`, `debug.memory_steps`)."""
        return self.root / "traces"

    def dropped(self, restart: int) -> Path:
        """The metrics of the steps that a restore dropped, which this attempt's trainer made after `restart` restarts
        in place."""
        return self.root / "dropped" / f"{restart}.jsonl"

    def node_report(self, rank: int) -> Path:
        """The state of a rank's node and roles when the attempt failed, as text (`slurm.agent.node_report`)."""
        return self.node_reports / f"{rank}.txt"

    @property
    def node_reports(self) -> Path:
        return self.root / "nodes"

    @property
    def conditions(self) -> Path:
        """The injected faults of disk and network that have begun in this attempt (`pipeline.run.fault_conditions`)."""
        return self.root / "conditions"

    @property
    def postmortem(self) -> Path:
        """The archive for a bug report, written after the attempt has failed."""
        return self.root / "postmortem.tar.gz"

    @property
    def redis(self) -> Path:
        return self.run / "redis" / self.attempt

    @property
    def shared(self) -> tuple[Path, ...]:
        """The folders in which ranks poll for files of other ranks."""
        moments = self.root / "moments"
        return self.rendezvous, self.events, self.marks, self.statuses, self.alive, self.timeline, self.logs, moments


@dataclass(frozen=True)
class RunPaths:
    """Files of a run that outlive its attempts."""

    root: Path

    @property
    def faults(self) -> Path:
        """The records of injected faults (`pipeline.run.fault_moments`)."""
        return self.root / "faults"

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
        """The folder of all attempts' rendezvous, with one folder per run_id."""
        return self.root / RENDEZVOUS

    @property
    def aside(self) -> Path:
        """Previous contents after a restart from scratch, or rows past a damaged checkpoint: a numbered folder each
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
        """The file of one of the trainer's jobs: `sft`, `preference` or `rl`."""
        return self.jobs / f"{name}.json"

    def job_state(self, digest: str) -> Path:
        """The record of an `optimizer_state` that holds a job file's checkpoint."""
        return self.jobs / f"state-{digest}.json"

    @property
    def model(self) -> Path:
        return self.root / MODEL

    @property
    def best(self) -> Path:
        """The model with SFT's lowest held-out loss."""
        return self.root / "best"

    @property
    def exports(self) -> Path:
        """The folder of checkpoints that were exported as models."""
        return self.root / "exports"

    @property
    def evaluation(self) -> Path:
        """The results of a run that only evaluates."""
        return self.root / "evaluation.json"

    @property
    def benchmark(self) -> Path:
        """The working folder of `evaluation.command`."""
        return self.root / "benchmark"

    @property
    def rollouts(self) -> Path:
        """The folder of samples that are saved for inspection (`pipeline.rollout.sample_store`)."""
        return self.root / "rollouts"

    @property
    def curriculum(self) -> Path:
        """The prompts that a curriculum chose (`pipeline.rollout.curriculum`)."""
        return self.root / "curriculum"

    @property
    def episodes(self) -> Path:
        """The journal of episodes in flight (`pipeline.rollout.episode_journal`)."""
        return self.root / "episodes"

    @property
    def metrics(self) -> Path:
        return self.root / METRICS

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def tracking(self) -> Path:
        """Files of trackers."""
        return self.root / "tracking"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def finished(self) -> Path:
        return self.root / "finished.json"

    @property
    def attached(self) -> Path:
        """The folder of the jobs that serve the run in addition to its own."""
        return self.root / ATTACHED

    def attempt(self, run_id: str, attempt: str) -> AttemptPaths:
        return AttemptPaths(self.root, run_id, attempt)


@dataclass(frozen=True)
class AttachedPaths(RunPaths):
    """Files of a job that is attached to a run, `<run>/attached/<number>/`: as those of a run, but with its code."""

    @property
    def served(self) -> RunPaths:
        """The run that the job serves."""
        return RunPaths(self.root.parent.parent)

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def code(self) -> Path:
        return self.served.code


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


def newest_attempt(folders: Iterable[str], job: str) -> str:
    """The job's attempt with the most restarts among names of folders; empty if none is an attempt of the job."""
    pairs = [folder.rpartition("-") for folder in folders]
    restarts = [int(restart) for of, _, restart in pairs if of == job and restart.isdecimal()]
    return f"{job}-{max(restarts)}" if restarts else ""
