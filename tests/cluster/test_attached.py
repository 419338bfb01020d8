"""Attached servers on a real Slurm: a run on a guaranteed partition, its further servers on a preemptible one.

python -m pytest -m "cluster and trial" tests/cluster/test_attached.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run.joined_servers import JoinedServers
from pipeline.utils.waiting import wait_for
from slurm.registry.attached_jobs import attached_jobs
from tests.cluster.disturbances import PATIENCE
from tests.cluster.slurm_cluster import ENDED, SlurmCluster
from tests.cluster.slurm_run import SlurmRun, launch
from tests.support.runs.launched import PROMPTS

pytestmark = [pytest.mark.cluster, pytest.mark.trial, pytest.mark.timeout(2 * PATIENCE)]
STEPS = 1200
"""More than are trained while the servers come and go, also on a fast machine."""
RUN = ("cluster.partition=high", "resources.inference.nodes=1", f"training.steps={STEPS}", "cluster.grace_seconds=10")


@pytest.fixture
def idle(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield cluster
    cluster.clear()


class AttachedRun:
    """A run, and what is attached to it."""

    def __init__(self, slurm: SlurmCluster, output: Path) -> None:
        self.slurm, self.output = slurm, output
        self.run = SlurmRun.start(slurm, output, "r", *RUN)

    def command(self, script: str, *arguments: str) -> str:
        done = launch(
            self.slurm, self.output, "", f"run={self.run.run.root}", *arguments, script=script, seconds=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def attach(self, servers: int, *keys: str) -> str:
        """The id of the attached job."""
        said = self.command("attach.py", f"servers={servers}", "nodes=1", "cluster.partition=low", *keys)
        return said.partition("submitted job ")[2].split()[0]

    def wait_for_servers(self, count: int, attempts: int = 1) -> None:
        """Until so many servers have joined the newest attempt, and serve its weights."""

        def serve() -> bool:
            if len(self.run.attempts) < attempts:
                return False
            servers = JoinedServers(self.run.attempts[-1]).read()
            return len(servers) == count and self._served(*servers) == count

        self.run.wait_for(f"{count} attached servers", serve, PATIENCE)

    def _served(self, *endpoints: str) -> int:
        """How many of these servers the actor has sent requests to lately."""
        try:
            status = json.loads((self.run.attempts[-1].status("actor.0")).read_text())["body"]["numbers"]
        except FileNotFoundError:
            return 0
        return sum(status.get(f"idle/{endpoint}", 1.0) < 1.0 for endpoint in endpoints)

    def state(self, job: str) -> str:
        return self.slurm.job(job)["JobState"]


def test_servers_that_are_preempted_killed_or_detached_leave_no_trace_in_the_run(
    idle: SlurmCluster, tmp_path: Path
) -> None:
    served = AttachedRun(idle, tmp_path)
    run = served.run
    run.wait_for_step(2, PATIENCE)
    first = served.attach(2)
    shown = served.command("attach.py", "servers=1", "--dry-run")
    assert "#SBATCH --job-name=r-attached-2" in shown
    assert len(attached_jobs(run.run)) == 1, "a dry run creates nothing"
    served.wait_for_servers(2)

    idle.run("scontrol", "requeue", first)  # the signals of a preemption with PreemptMode=REQUEUE
    served.wait_for_servers(0)
    served.wait_for_servers(2)

    idle.run("scontrol", "requeue", run.job)  # the servers follow the run to its next attempt
    served.wait_for_servers(2, attempts=2)

    second = served.attach(1)
    served.wait_for_servers(3, attempts=2)
    idle.run("scancel", "--signal=KILL", "--full", second)
    wait_for("the killed job to end", lambda: served.state(second) in ENDED, PATIENCE)

    third = served.attach(1)
    wait_for("the third job", lambda: any("inference.4" in line for line in _names(served)), PATIENCE)
    said = served.command("detach.py", "job=3")
    assert said.splitlines()[-1] == "r, attached job 3: over"
    assert served.state(third) in ENDED

    assert run.wait_for_end(PATIENCE)["JobState"] == "COMPLETED", run.output()
    wait_for("the first job to leave by itself", lambda: served.state(first) in ENDED, PATIENCE)
    assert served.state(first) == "COMPLETED"
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    positions = [json.loads(line)["position"] for line in run.run.ledger.read_text().splitlines()]
    assert len(positions) == len(set(positions)) == STEPS * PROMPTS
    assert len(run.attempts) == 2, "only the operator's requeue ended an attempt"
    for index in range(2):
        failure = run.failure(index)
        assert failure is None, failure
    assert not JoinedServers(run.attempts[-1]).read()
    assert len(attached_jobs(run.run)) == 3
    assert "nothing to detach" in served.command("detach.py")


def _names(served: AttachedRun) -> list[str]:
    return [server.name for server in JoinedServers(served.run.attempts[-1]).read().values()]
