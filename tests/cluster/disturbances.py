"""Ways in which a site interrupts a job, and the phases of a run in which it may.

A phase is a function that returns as soon as a run is in it; chance decides how far into it. A way is a function that
interrupts the job of a run once.
"""

import random
from collections.abc import Callable

from pipeline.run.events import Events
from pipeline.utils.waiting import wait_for
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun

PATIENCE = 900.0
"""Seconds: bounds a hang, and decides no race; a run lasts ten times as long on a machine with much other work."""
PARTITIONS = {"grace": "grace"}
"""The partition that a way needs; all others run in `low`."""


def rendezvous(run: SlurmRun, chance: random.Random) -> None:
    """The first rank has published its node record, and there is no world yet."""
    _until(
        run, "a node record", lambda: any(run.attempts[-1].rendezvous.glob("nodes/*.json")) if run.attempts else False
    )


def start_up(run: SlurmRun, chance: random.Random) -> None:
    """Roles are starting; the trainer, the servers, or the actor may be up already."""
    wanted = chance.choice([("trainer.0", "starting"), ("redis.0", "ready"), ("inference.0", "starting")])
    _until(run, f"{wanted[0]} {wanted[1]}", lambda: wanted in run.history())


def sft_phase(run: SlurmRun, chance: random.Random) -> None:
    """SFT is at a random step."""
    step = chance.randrange(2, 280)
    _until(run, f"step {step} of SFT", lambda: _step(run, "sft") >= step)


def training(run: SlurmRun, chance: random.Random) -> None:
    """RL is at a random step."""
    step = chance.randrange(1, 27)
    _until(run, f"step {step}", lambda: _step(run, "rl") >= step)


def checkpoint(run: SlurmRun, chance: random.Random) -> None:
    """A checkpoint of RL is being written: its folder exists and its COMPLETE does not."""
    step = chance.randrange(5, 26, 5)
    folder = run.run.checkpoints / f"rl-{step}"
    _until(run, f"checkpoint rl-{step} to begin", folder.exists, pause=0.002)


def shutdown(run: SlurmRun, chance: random.Random) -> None:
    """Training has finished and the roles come down."""

    def told() -> bool:
        return any(Events(attempt).get("training_finished") for attempt in run.attempts)

    _until(run, "training_finished", told)


PHASES: dict[str, Callable[[SlurmRun, random.Random], None]] = {
    "rendezvous": rendezvous,
    "start-up": start_up,
    "SFT": sft_phase,
    "training": training,
    "checkpoint": checkpoint,
    "shutdown": shutdown,
}


def notice(slurm: SlurmCluster, run: SlurmRun, chance: random.Random) -> None:
    """USR2 to every process of the job, as ahead of its time limit."""
    slurm.run("scancel", "--signal=USR2", run.job)


def signal(slurm: SlurmCluster, run: SlurmRun, chance: random.Random) -> None:
    """TERM to every process of the job, and nothing more."""
    slurm.run("scancel", "--signal=TERM", run.job)


def requeue(slurm: SlurmCluster, run: SlurmRun, chance: random.Random) -> None:
    """An operator requeues the job."""
    slurm.run("scontrol", "requeue", run.job)


def preempt(slurm: SlurmCluster, run: SlurmRun, chance: random.Random) -> None:
    """A job of a higher partition takes all nodes for three seconds."""
    slurm.submit("sleep 3", "--partition=high", f"--nodes={slurm.nodes}", "--exclusive")


def lose_node(slurm: SlurmCluster, run: SlurmRun, chance: random.Random) -> None:
    """One of the job's nodes loses power and stays away; the fourth node takes its place."""
    nodes = slurm.run("scontrol", "show", "hostnames", run.fields()["NodeList"]).split()
    slurm.lose_node(int(chance.choice(nodes).removeprefix("node")))


WAYS: dict[str, Callable[[SlurmCluster, SlurmRun, random.Random], None]] = {
    "notice": notice,
    "signal": signal,
    "requeue": requeue,
    "grace": preempt,
    "no grace": preempt,
    "node": lose_node,
}
WAY_WORDS = {
    "notice": "USR2 ahead of the time limit",
    "signal": "`scancel --signal=TERM`",
    "requeue": "`scontrol requeue`",
    "grace": "preemption, 30 s grace",
    "no grace": "preemption, no grace",
    "node": "a node loses power",
}


def _step(run: SlurmRun, job: str) -> int:
    return max((row["step"] for row in run.rows(job=job)), default=0)


def _until(run: SlurmRun, what: str, probe: Callable[[], bool], pause: float = 0.01) -> None:
    wait_for(
        f"{what} (job {run.job})",
        lambda: probe() or run.has_ended(),
        PATIENCE,
        pause=pause,
        longest_pause=max(pause, 0.05),
    )
    assert probe(), f"the job ended before {what}: {run.output()}"
