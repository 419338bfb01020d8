"""Jobs of a real Slurm, ended in every way: the real batch file, the real agents without roles, the real decisions."""

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

from pipeline.run.paths import AttemptPaths
from pipeline.run.run_documents import Outcome, SubmittedJob
from pipeline.topology.plan import make_plan
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from slurm.scheduler.slurm.batch_file import batch_file
from tests.cluster import stand_in
from tests.cluster.slurm_cluster import SlurmCluster
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.patience import WAIT_SECONDS

pytestmark = [pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
MANY = 90.0


@dataclass
class Life:
    """A job of two ranks, and what it leaves."""

    slurm: SlurmCluster
    run: FakeRun
    job: str

    def paths(self, restart: int) -> AttemptPaths:
        return self.run.paths.attempt(self.run.identity.run_id, f"{self.job}-{restart}")

    def outcome(self, restart: int) -> Outcome:
        found = shared_files.read_document(self.paths(restart).outcome, Outcome)
        assert found is not None, f"attempt {restart} has no outcome: {self.log()}"
        return found

    @property
    def decisions(self) -> list[str]:
        """Of all attempts, in order; an empty one where the attempt was cut off before it could decide."""
        restarts = range(int(self.slurm.job(self.job)["Restarts"]) + 1)
        found = [shared_files.read_document(self.paths(restart).outcome, Outcome) for restart in restarts]
        return [outcome.decision if outcome else "" for outcome in found]

    def wait_for_ranks(self, restart: int = 0) -> None:
        """Until every rank of an attempt takes part."""

        def all_there() -> bool:
            return len(list(self.paths(restart).timeline.glob("*.*"))) == RANKS

        wait_for(f"the ranks of attempt {self.job}-{restart}", all_there, MANY, missing=self.log)

    def wait_for_outcome(self, restart: int) -> None:
        wait_for(f"outcome {self.job}-{restart}", self.paths(restart).outcome.exists, MANY, missing=self.log)

    def end(self, state: str, seconds: float = MANY) -> dict[str, str]:
        return self.slurm.wait_for_state(self.job, state, seconds)

    def log(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.run.paths.submitit.rglob("*.out")))


def start(slurm: SlurmCluster, root: Path, name: str, *script: str, **cluster: Any) -> Life:
    """Submit a run whose attempts follow the script."""
    sections = {"services": {"nodes": 0}}
    config = make_config(
        name=name,
        cluster={"scheduler": "slurm", "cpus": 1, "notice_seconds": 0, "stop_seconds": 1, "fs_visibility_seconds": 1}
        | cluster,
        model={"path": "tiny_qwen3", "init": "random"},
        resources=sections,
    )
    run = FakeRun(root / name, config)
    (run.root / stand_in.SCRIPT).write_text(json.dumps(script))
    run.paths.code.symlink_to(ROOT)
    folder = run.paths.submitit / "slurm"
    folder.mkdir(parents=True)
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(folder)])
    plan = make_plan(config)
    assert plan.ranks == RANKS
    text = batch_file(
        config,
        plan,
        run.paths,
        run_id=run.identity.run_id,
        folder=folder,
        python=sys.executable,
        command=command,
    )
    file = run.root / "batch.sh"
    file.write_text(text)
    job = slurm.run("sbatch", "--parsable", str(file))
    DelayedSubmission(stand_in.StandIn(run.root)).dump(folder / f"{job}_submitted.pkl")
    shared_files.write_document(
        run.paths.job, SubmittedJob(kind="slurm", job=job, user="u", host="h", time=time.time())
    )
    return Life(slurm, run, job)


@pytest.fixture(scope="module")
def lives(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Life]]:
    """Jobs that live their lives side by side, each disturbed once as its name says."""
    root = tmp_path_factory.mktemp("lives")
    found = {
        "notice": start(cluster, root, "notice", "wait", "finish"),
        "storm": start(cluster, root, "storm", "wait", "finish"),
        "requeue": start(cluster, root, "requeue", "wait", "finish"),
        "stubborn": start(cluster, root, "stubborn", "stubborn", "finish"),
        "cancel": start(cluster, root, "cancel", "wait"),
        "killed": start(cluster, root, "killed", "killed", "finish"),
        "first": start(cluster, root, "first", "fail"),
        "loop": start(cluster, root, "loop", "commit", "fail", max_failures=2),
        "budget": start(cluster, root, "budget", "wait", max_restarts=1),
        "limit": start(cluster, root, "limit", "wait", "finish", time="1", notice_seconds=20),  # told after 10 to 40 s
        "late": start(cluster, root, "late", "wait", "finish", time="1"),
    }
    for name in ("notice", "storm", "requeue", "stubborn", "cancel", "budget"):
        found[name].wait_for_ranks()
    cluster.run("scancel", "--signal=USR2", found["notice"].job)
    cluster.run("scancel", "--signal=USR2", found["budget"].job)
    cluster.run("scontrol", "requeue", found["requeue"].job)
    cluster.run("scontrol", "requeue", found["stubborn"].job)
    cluster.run("scancel", found["cancel"].job)
    for signal in ("TERM", "USR2", "TERM", "USR1", "TERM"):
        cluster.run("scancel", "--full", f"--signal={signal}", found["storm"].job)
        time.sleep(0.2)
    yield found
    for life in found.values():
        cluster.run("scancel", "--quiet", life.job)
    cluster.wait_until_idle()


def test_a_job_that_got_its_signal_requeues_itself_once_and_ends_completed(lives: dict[str, Life]) -> None:
    life = lives["notice"]
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]
    assert "SIGUSR2" in life.outcome(0).reason


def test_signals_that_reach_the_whole_job_again_and_again_lead_to_one_requeue(lives: dict[str, Life]) -> None:
    life = lives["storm"]
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]


def test_a_job_that_slurm_requeues_is_left_to_slurm(lives: dict[str, Life]) -> None:
    life = lives["requeue"]
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["left", "finished"]


def test_a_cancelled_job_stays_cancelled(lives: dict[str, Life]) -> None:
    life = lives["cancel"]
    assert life.end("CANCELLED")["Restarts"] == "0"
    assert life.decisions == ["left"]


def test_a_rank_that_was_killed_is_lost_and_the_job_runs_again(lives: dict[str, Life]) -> None:
    life = lives["killed"]
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]
    assert "rank 1 ended without an exit marker" in life.outcome(0).reason


def test_a_failure_before_the_first_commit_ends_the_job(lives: dict[str, Life]) -> None:
    life = lives["first"]
    assert life.end("FAILED")["Restarts"] == "0"
    assert life.decisions == ["stopped"]
    assert "it was told to fail" in life.outcome(0).reason
    assert life.run.paths.report.exists()


def test_a_job_that_fails_over_and_over_without_a_commit_stops(lives: dict[str, Life]) -> None:
    life = lives["loop"]
    assert life.end("FAILED")["Restarts"] == "2"
    assert life.decisions == ["requeued", "requeued", "stopped"]
    assert [life.outcome(restart).failures for restart in range(3)] == [0, 1, 2]


def test_a_job_whose_restarts_are_used_up_fails(lives: dict[str, Life], cluster: SlurmCluster) -> None:
    life = lives["budget"]
    life.wait_for_ranks(1)
    cluster.run("scancel", "--signal=TERM", life.job)
    assert life.end("FAILED")["Restarts"] == "1"
    assert life.decisions == ["requeued", "stopped"]
    assert "max_restarts=1" in life.outcome(1).reason


def test_the_notice_before_the_time_limit_leads_to_a_requeue(lives: dict[str, Life]) -> None:
    life = lives["limit"]
    assert life.end("COMPLETED", 120)["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]
    assert "SIGUSR2" in life.outcome(0).reason
    assert life.outcome(0).failures == 1  # it committed nothing


def test_an_attempt_that_slurm_had_to_kill_is_left_to_slurm_and_does_no_harm(lives: dict[str, Life]) -> None:
    life = lives["stubborn"]
    assert life.end("COMPLETED")["Restarts"] == "1"
    # The kill reaches the ranks first: the batch script may still say that Slurm has the job, or be cut off.
    assert life.decisions in (["", "finished"], ["left", "finished"])


def are_blocking(life: Life, signal: Signals) -> bool:
    """Whether each rank's Python has begun and blocks a signal. Before, the signal ends the rank, as on a lost node."""
    logs = {life.run.paths.submitit.resolve() / "slurm" / f"{life.job}_{rank}_log.out" for rank in range(RANKS)}
    python, blocking = Path(sys.executable).resolve(), set[Path]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if (process / "exe").readlink() == python:
                (mask,) = re.findall(r"SigBlk:\s*(\w+)", (process / "status").read_text())
                blocking |= {(process / "fd" / "1").readlink()} if int(mask, 16) >> signal - 1 & 1 else set()
    return logs <= blocking


@pytest.mark.parametrize("signal", ["TERM", "USR2"])
def test_a_signal_that_comes_before_an_agent_can_hear_it_is_heard(
    cluster: SlurmCluster, tmp_path: Path, signal: str
) -> None:
    life = start(cluster, tmp_path, f"early-{signal}", "late", "finish")
    life.end("RUNNING")
    wait_for("the ranks to block the signal", lambda: are_blocking(life, Signals[f"SIG{signal}"]), MANY)
    assert not life.paths(0).root.exists()  # no agent is up
    cluster.run("scancel", f"--signal={signal}", life.job)
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]
    first = life.outcome(0)
    assert first.reason.startswith(f"stop requested (SIG{signal}, agent.")
    assert first.failures == (1 if signal == "USR2" else 0)  # as at a time limit that is too short to start
    assert "Bypassing signal SIGTERM" not in life.log()  # submitit's own handlers heard nothing
    assert "Caught signal" not in life.log()


@pytest.mark.slow
def test_a_job_that_ran_into_its_time_limit_is_requeued(lives: dict[str, Life]) -> None:
    life = lives["late"]
    assert life.end("COMPLETED", 240)["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]
    assert "SIGTERM" in life.outcome(0).reason
    assert life.outcome(0).failures == 1


def preempt(slurm: SlurmCluster) -> str:
    """Take all nodes for a moment."""
    return slurm.submit("sleep 1", "--partition=high", f"--nodes={slurm.nodes}", "--exclusive")


def test_a_preemption_without_grace_is_left_to_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    life = start(cluster, tmp_path, "preempted", "wait", "finish")
    life.wait_for_ranks()
    other = preempt(cluster)
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["left", "finished"]
    cluster.wait_for_state(other, "COMPLETED", WAIT_SECONDS)


def test_a_site_that_cancels_what_it_preempts_does_not_end_the_run(cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster.run("scontrol", "update", "partitionname=low", "preemptmode=cancel")
    try:
        life = start(cluster, tmp_path, "cancelled", "wait", "finish")
        life.wait_for_ranks()
        other = preempt(cluster)
        assert life.end("COMPLETED")["Restarts"] == "1"
        assert life.decisions == ["requeued", "finished"]
        cluster.wait_for_state(other, "COMPLETED", WAIT_SECONDS)
    finally:
        cluster.run("scontrol", "update", "partitionname=low", "preemptmode=requeue")


def test_a_job_with_grace_requeues_itself_within_it(cluster: SlurmCluster, tmp_path: Path) -> None:
    life = start(cluster, tmp_path, "graced", "wait", "finish", partition="grace")
    life.wait_for_ranks()
    began = time.monotonic()
    other = preempt(cluster)
    life.wait_for_outcome(0)
    assert time.monotonic() - began < 25  # of 30 seconds of grace
    assert life.end("COMPLETED")["Restarts"] == "1"
    assert life.decisions == ["requeued", "finished"]
    cluster.wait_for_state(other, "COMPLETED", WAIT_SECONDS)
