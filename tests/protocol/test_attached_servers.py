"""An attached node with real processes as its servers: the attempts that it serves, and what it leaves in them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from pipeline.errors import RollcallError
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.run.joined_servers import JoinedServers
from pipeline.run.paths import AttachedPaths
from pipeline.utils.waiting import wait_for
from slurm.agent import attached_agent, supervisor
from slurm.agent.attached_agent import AttachedNode
from slurm.agent.supervisor import StopRequest
from slurm.registry import attached_jobs
from slurm.scheduler.rank_environment import Environment
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeAttempt, FakeRun
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

SERVER = """
import os, sys, time
print('up', flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print('stopped beside', os.listdir(sys.argv[1]))
"""
TINY = {"path": "tiny_qwen3", "init": "random"}
HERE = Environment(
    scheduler="local",
    job="9",
    restart=0,
    rank=0,
    ranks=1,
    addresses=("127.0.0.2",),
    allocated=False,
    interface="127.0.0.2",
    visible_gpus="",
)


class Attached:
    """A job of two servers on one node, attached to a run whose attempts the test makes and ends."""

    def __init__(self, root: Path, **cluster: float) -> None:
        quick = {"scheduler": "local", "rendezvous_seconds": 2, "stop_seconds": 1, **cluster}
        config = make_config(cluster=quick, model=TINY, recovery={"inference": 1})
        self.run, self.notice, self.failure = FakeRun(root / "run", config), StopRequest(), ""
        inference = config.resources.inference.model_copy(update={"nodes": 1, "servers": 2})
        servers = config.model_copy(update={"resources": config.resources.model_copy(update={"inference": inference})})
        self.job: AttachedPaths = attached_jobs.create_attached(self.run.paths, 1, servers)
        self.first = attached_jobs.first_index(self.run.paths, 1)
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        try:
            with ExitStack() as resources:
                AttachedNode(self.job, self.first, HERE, self.notice, resources).serve_attempts()
        except RollcallError as error:
            self.failure = str(error)

    def begin(self, job: str) -> FakeAttempt:
        """A new attempt of the run."""
        self.run.submit(job, "local")
        attempt = self.run.attempt(f"{job}-0")
        attempt.meet()
        return attempt

    def names_in(self, attempt: FakeAttempt) -> list[str]:
        return [server.name for server in JoinedServers(attempt.paths).read().values()]

    def wait_in(self, attempt: FakeAttempt, servers: int = 2) -> None:
        wait_for("the servers", lambda: len(self.names_in(attempt)) == servers, WAIT_SECONDS)

    def processes(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if _serves(child)]

    def join(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        assert not self.processes()


def _serves(process: psutil.Process) -> bool:
    try:
        return SERVER in process.cmdline()
    except psutil.Error:
        return False


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attached]:
    def launch(context: RoleContext) -> RoleCommand:
        log = context.paths.log("inference", context.placement.index)
        argv = (sys.executable, "-c", SERVER, str(tmp_path / "run" / "attempts" / "a-0" / "servers"))
        return RoleCommand(argv=argv, ready=lambda: b"up" in log.read_bytes())

    monkeypatch.setattr(supervisor, "role_command", launch)
    monkeypatch.setattr(attached_agent, "node_forks", lambda *_: ExitStack())
    monkeypatch.setattr(attached_agent, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(attached_agent, "RECORD_SECONDS", 0.2)
    made = Attached(tmp_path)
    yield made
    made.notice.reason = "the test is over"
    made.join()


def test_servers_join_an_attempt_and_the_next_one_and_end_with_the_run(attached: Attached) -> None:
    first = attached.begin("a")
    attached.start()
    attached.wait_in(first)
    records = JoinedServers(first.paths).read()
    own = attached.run.config.resources.inference.nodes * attached.run.config.resources.inference.servers
    assert sorted(server.name for server in records.values()) == [f"inference.{own}", f"inference.{own + 1}"]
    assert len(records) == 2, "each has a port of its own"
    first.tell("draining", "agent.0", "SIGUSR2")
    wait_for("the servers to leave", lambda: not attached.names_in(first), WAIT_SECONDS)
    second = attached.begin("b")
    attached.wait_in(second)
    assert JoinedServers(second.paths).read().keys() == records.keys(), "the node keeps its ports"
    assert not attached.names_in(first)
    attached.run.finish(3)
    second.tell("training_finished", "trainer.0")
    attached.join()
    assert not attached.failure
    assert not attached.names_in(second)
    assert not list(attached.job.rendezvous.rglob("world.json")), "it has the attempt's secret"


def test_a_preempted_node_removes_its_records_before_its_servers_stop(attached: Attached) -> None:
    attempt = attached.begin("a")
    attached.start()
    attached.wait_in(attempt)
    attached.notice.reason = "SIGTERM"
    attached.join()
    logs = [log.read_text() for log in attached.job.attempts.glob("*/logs/*")]
    assert [log.splitlines() for log in logs] == [["up", "stopped beside []"]] * 2
    assert not attached.failure
    assert not list(attempt.paths.events.glob("*")), "it is no event of the run"
    assert not attempt.paths.first_failure.exists()


def test_a_restarted_server_joins_again_and_one_that_keeps_failing_ends_the_node(attached: Attached) -> None:
    attempt = attached.begin("a")
    attached.start()
    attached.wait_in(attempt)
    since = {server.name: server.since for server in JoinedServers(attempt.paths).read().values()}
    attached.processes()[0].kill()

    def joined_again() -> bool:
        now = {server.name: server.since for server in JoinedServers(attempt.paths).read().values()}
        return now.keys() == since.keys() and now != since

    wait_for("the server to join again", joined_again, WAIT_SECONDS)

    def kill_until_it_fails() -> bool:
        for process in attached.processes():
            process.kill()
        return bool(attached.failure)

    wait_for("the node to fail", kill_until_it_fails, WAIT_SECONDS)
    attached.join()
    assert "killed by SIGKILL" in attached.failure
    assert not list(attempt.paths.events.glob("*"))
    assert not attached.names_in(attempt)


def test_a_record_that_the_trainer_has_removed_is_written_again(attached: Attached) -> None:
    attempt = attached.begin("a")
    attached.start()
    attached.wait_in(attempt)
    JoinedServers(attempt.paths).remove(attached.names_in(attempt)[0])
    attached.wait_in(attempt)


def test_a_node_leaves_where_no_attempt_comes(attached: Attached) -> None:
    attached.start()
    attached.join()
    assert not attached.failure
