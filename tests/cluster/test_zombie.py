"""A node that goes on with its rank while the job runs elsewhere: the old attempt harms nothing.

The nasty case: what is cut is the network alone, so the zombie still sees every file of the run.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pipeline.checkpoints import newest_checkpoint
from pipeline.topology.plan import RoleName
from pipeline.utils.waiting import wait_for
from tests.cluster.networks import NetworkedCluster
from tests.cluster.slurm_run import SlurmRun
from tests.patience import WAIT_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS, PROMPTS, EVERY, CUT_AT = 32, 8, 8, 6
CONFIG = (
    f"training.steps={STEPS}",
    f"training.checkpoint_every={EVERY}",
    "resources.inference.nodes=1",
    "resources.trainer.gpus=1",
    "resources.inference.gpus=1",
    "cluster.grace_seconds=3",
)


@pytest.fixture(scope="module")
def networked(requires_networks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedCluster]:
    """Four nodes; Slurm requeues a job that lost one after `kill_wait` seconds."""
    with NetworkedCluster(tmp_path_factory.mktemp("slurm"), kill_wait=16) as started:
        yield started


@pytest.mark.trial  # two minutes each
@pytest.mark.parametrize("role", ["trainer", "redis"])
def test_a_run_goes_on_elsewhere_when_a_node_is_cut_off_and_the_zombie_ends_by_itself(
    networked: NetworkedCluster, tmp_path: Path, role: RoleName
) -> None:
    run = SlurmRun.start(networked, tmp_path, "r", *CONFIG)
    run.wait_for_step(CUT_AT)
    rank, node = place_of(run, role)
    networked.cut(node)
    run.wait_for("Slurm to notice", lambda: networked.node_states()[f"node{node}"].startswith("down"), WAIT_SECONDS)
    assert running(networked, node, f"pipeline.roles.{role}" if role == "trainer" else "redis-server")
    left = run.attempts[0].down(f"agent.{rank}")
    wait_for("the zombie, which still sees the files, to come down", left.exists, WAIT_SECONDS, missing=run.output)
    run.wait_for_attempts(2)
    networked.heal(node)
    run.wait_for_end()
    networked.wait_until_empty(node)
    assert_taken_over(networked, run, node)
    networked.wait_until_idle()


@pytest.mark.trial  # three minutes
def test_a_trainer_that_hangs_in_a_commit_and_wakes_up_after_it_was_replaced_is_refused(
    networked: NetworkedCluster, tmp_path: Path
) -> None:
    run = SlurmRun.start(networked, tmp_path, "r", *CONFIG)
    run.wait_for_step(1)
    _, node = place_of(run, "trainer")
    step = hang_in_a_commit(networked, run, node)
    networked.cut(node)
    run.wait_for_attempts(2)
    first, second = run.attempts
    wait_for(
        "a step of the new attempt",
        lambda: any(row["attempt"] == second.attempt for row in run.rows()),
        WAIT_SECONDS,
        missing=run.output,
        longest_pause=0.05,
    )
    assert running(networked, node, "pipeline.roles.trainer")
    send(networked.processes(node), signal.SIGCONT)
    log = first.log("trainer", 0)
    # Its checkpoint is refused, or fails since the new attempt has removed the files. Then the next checkpoint is
    # refused, or its agent stops the trainer while that waits for its attempt's Redis.
    wait_for(
        "the zombie to fail and to come down",
        lambda: f"rl-{step} is not committed" in log.read_text() and first.down("trainer.0").exists(),
        WAIT_SECONDS,
        missing=log.read_text,
    )
    assert f" committed rl-{step}" not in log.read_text()
    networked.heal(node)
    run.wait_for_end()
    networked.wait_until_empty(node)
    assert_taken_over(networked, run, node)
    networked.wait_until_idle()


def place_of(run: SlurmRun, role: RoleName) -> tuple[int, int]:
    """The rank that has a role in the newest attempt, and the number of its node."""
    world = run.world()
    assert world is not None
    rank = world.of_role(role)[0].rank
    return rank, int(run.node_infos()[rank].hostname.removeprefix("node"))


def running(cluster: NetworkedCluster, node: int, word: str) -> list[int]:
    """The pids of the processes on a node that have `word` in their command line."""
    return [pid for pid in cluster.processes(node) if word in " ".join(psutil.Process(pid).cmdline())]


def hang_in_a_commit(cluster: NetworkedCluster, run: SlurmRun, node: int) -> int:
    """Stop all of the trainer's node while a checkpoint of RL is being written and has no manifest yet; its step."""
    trainer, attempt = running(cluster, node, "pipeline.roles.trainer"), run.attempts[-1].attempt
    for step in range(EVERY, STEPS, EVERY):
        folder = run.run.checkpoints / f"rl-{step}" / attempt
        wait_for(f"checkpoint rl-{step} to begin", folder.exists, WAIT_SECONDS, pause=0.001, longest_pause=0.001)
        send(trainer, signal.SIGSTOP)
        send(cluster.processes(node), signal.SIGSTOP)
        if not (folder / "manifest.json").exists():
            return step
        send(cluster.processes(node), signal.SIGCONT)
    raise AssertionError("every checkpoint was written before the node stood still")


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def assert_taken_over(cluster: NetworkedCluster, run: SlurmRun, node: int) -> None:
    """Later attempts finished the run, the second without the node, and all that counts from its resume on is theirs.

    The second may be told to end, by Slurm: an old srun that is still there when its node is back asks for the end of
    its step, by a number that the step of the second attempt has too.
    """
    fields = run.fields()
    first, *later = (attempt.attempt for attempt in run.attempts)
    assert (fields["JobState"], int(fields["Restarts"])) == ("COMPLETED", len(later)), run.output()
    assert len(later) == 1 or told_to_end_by_the_old_srun(run), run.output()
    assert cluster.address(node) in [address for node_info in run.node_infos(0) for address in node_info.addresses]
    assert cluster.address(node) not in [address for node_info in run.node_infos(1) for address in node_info.addresses]
    assert run.finished is not None
    assert (run.finished.steps, run.finished.attempt) == (STEPS, later[-1])

    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    authors = [row["attempt"] for row in rows]
    assert authors == sorted(authors)
    assert set(authors) <= {first, *later}, "of the first, those of steps that it had committed"
    assert authors[-1] == later[-1]

    settled = Counter(json.loads(line)["position"] for line in run.run.ledger.read_text().splitlines())
    assert set(settled.values()) == {1}
    assert len(settled) == STEPS * PROMPTS

    newest = newest_checkpoint(str(run.run.checkpoints), hashes=True)
    assert newest is not None
    assert (newest.manifest.step, newest.manifest.attempt) == (STEPS, later[-1])


def told_to_end_by_the_old_srun(run: SlurmRun) -> bool:
    """Whether the second attempt was ended in order, once, after the first one's srun had asked for it."""
    _, second, *others = run.attempts
    output = "".join(log.read_text() for log in (run.run.submitit / "slurm").glob(f"{run.job}_*_log.out"))
    asked = "srun: launch/slurm: _step_signal: Terminating StepId" in output
    return asked and len(others) == 1 and f"attempt {second.attempt}: requeued: stop requested" in output
