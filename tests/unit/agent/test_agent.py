"""How an agent begins and ends an attempt, without roles."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from pipeline.errors import RollcallError
from pipeline.roles.role_context import RoleContext
from pipeline.run.events import Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, SubmittedJob
from pipeline.topology.plan import Plan, make_plan
from pipeline.utils import shared_files, subprocesses
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import wait_for
from slurm.agent import agent
from slurm.agent.agent import END_SIGNALS, Agent, note_signals, run_agent
from slurm.agent.agent_heartbeat import HeartbeatFile, mark_down, unexited_ranks
from slurm.agent.gpu_locks import Claimant, claim_visible, missing_gpus
from slurm.agent.multi_process_service import PIPES
from slurm.agent.neighbor_watch import NeighborCheck
from slurm.agent.node_check import find_node
from slurm.agent.preflight import MPS_PROGRAM
from slurm.agent.role_lifecycle import End
from slurm.agent.supervisor import StopRequest
from slurm.scheduler.rank_environment import Environment
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.gpus import give_gpus
from tests.fakes.run_directory import FakeRun
from tests.patience import WAIT_SECONDS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def others_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent ends all that runs below its process; here that is pytest's, which has processes of other tests."""
    monkeypatch.setattr(subprocesses, "end_descendants", list)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    config = make_config(
        cluster={
            "scheduler": "slurm",
            "fs_visibility_seconds": 0,
            "max_restarts": 1,
            "stop_seconds": 0.5,
            "grace_seconds": 0.5,
        },
        model={"path": "tiny_qwen3", "init": "random"},
    )
    return FakeRun(tmp_path / "run", config)


def environment(*, restart: int = 0, ranks: int = 1) -> Environment:
    return Environment(scheduler="slurm", job="7", restart=restart, rank=0, ranks=ranks, addresses=("127.0.0.1",))


def paths_of(run: FakeRun, restart: int) -> AttemptPaths:
    return run.paths.attempt(run.identity.run_id, f"7-{restart}")


def test_a_requeued_job_of_a_finished_run_starts_nothing_and_ends_well(run: FakeRun) -> None:
    shared_files.write_document(run.paths.finished, Finished(time=0.0, steps=1, attempt="7-0"))
    assert run_agent(run.paths, environment(restart=1), StopRequest()) == "finished"
    assert not run.paths.attempts.exists()


def test_a_job_refuses_a_run_that_was_submitted_as_another(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "OWNERSHIP_SECONDS", 0.05)
    shared_files.write_document(run.paths.job, SubmittedJob(kind="slurm", job="8", user="u", host="h", time=0.0))
    with pytest.raises(RollcallError, match="names another job than 7"):
        run_agent(run.paths, environment(), StopRequest())
    assert not run.paths.attempts.exists()


def test_a_job_that_starts_before_it_is_recorded_waits_for_the_record(run: FakeRun) -> None:
    record = SubmittedJob(kind="slurm", job="6", user="u", host="h", time=0.0)
    shared_files.write_document(run.paths.job, record)
    launcher = threading.Timer(
        0.3, shared_files.write_document, (run.paths.job, SubmittedJob(**_fields(record, job="7")))
    )
    launcher.start()
    with pytest.raises(RollcallError, match="1 ranks and the plan 3"):
        run_agent(run.paths, environment(), StopRequest())
    launcher.join()


@pytest.mark.parametrize("name", ["finished.json", "job.json", "run.json", "config.json"])
def test_a_disk_that_fails_for_a_moment_while_an_agent_begins_is_asked_again(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read, left = Path.read_bytes, iter(range(2))

    def failing(path: Path) -> bytes:
        if path.name == name and next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    shared_files.write_document(run.paths.job, SubmittedJob(kind="slurm", job="7", user="u", host="h", time=0.0))
    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(RollcallError, match="1 ranks and the plan 3"):
        run_agent(run.paths, environment(), StopRequest())


def test_a_job_that_is_told_to_end_does_not_wait_for_its_record(run: FakeRun) -> None:
    shared_files.write_document(run.paths.job, SubmittedJob(kind="slurm", job="6", user="u", host="h", time=0.0))
    notice = StopRequest()
    told = threading.Timer(0.3, setattr, (notice, "reason", "SIGTERM"))
    told.start()
    began = time.monotonic()
    with pytest.raises(RollcallError, match="names another job than 7"):
        run_agent(run.paths, environment(), notice)
    assert 0.3 <= time.monotonic() - began < WAIT_SECONDS
    assert not run.paths.attempts.exists()
    told.join()


def test_a_restart_beyond_the_limit_fails_with_the_key_to_raise(run: FakeRun) -> None:
    with pytest.raises(RollcallError, match="restart 2"):
        run_agent(run.paths, environment(restart=2), StopRequest())
    failure = shared_files.read_document(paths_of(run, 2).first_failure, FirstFailure)
    assert failure is not None
    assert "cluster.max_restarts=1" in failure.one_line()


def test_an_agent_that_fails_says_why_and_that_it_is_down(run: FakeRun) -> None:
    with pytest.raises(RollcallError):
        run_agent(run.paths, environment(), StopRequest())
    paths = paths_of(run, 0)
    failed = Events(paths).get("failed")
    assert failed is not None
    assert failed.by == "agent.0"
    assert unexited_ranks(FileSharedDir(paths.root), 1) == ()
    assert (paths.alive / "0").exists()


def test_an_agent_that_fails_waits_until_the_others_are_down(run: FakeRun) -> None:
    paths = paths_of(run, 0)
    other = threading.Timer(1.0, mark_down, (FileSharedDir(paths.root), 1))
    other.start()
    began = time.monotonic()
    with pytest.raises(RollcallError):
        run_agent(run.paths, environment(ranks=2), StopRequest())
    assert time.monotonic() - began >= 1.0
    assert unexited_ranks(FileSharedDir(paths.root), 2) == ()
    other.join()


def test_an_agent_that_fails_does_not_wait_for_ever_for_a_lost_one(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_SLACK_SECONDS", 0.0)
    began = time.monotonic()
    with pytest.raises(RollcallError):
        run_agent(run.paths, environment(ranks=2), StopRequest())
    assert 1.0 <= time.monotonic() - began < WAIT_SECONDS
    assert unexited_ranks(FileSharedDir(paths_of(run, 0).root), 2) == (1,)


def test_the_first_signal_decides_and_the_others_do_nothing() -> None:
    notice = note_signals()
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert notice.reason == "SIGUSR2"


def test_a_signal_that_came_while_it_was_blocked_is_heard() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads of the tests do not block it
        assert note_signals().reason == "SIGTERM"
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(END_SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_an_agent_hears_signals_before_it_looks_for_its_place(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def detect() -> Environment:
        os.kill(os.getpid(), signal.SIGUSR2)
        return environment()

    def stand_in(_run: RunPaths, _environment: Environment, notice: StopRequest) -> End:
        heard.append(notice.reason)
        return "preempted"

    monkeypatch.setattr(agent, "detect_environment", detect)
    monkeypatch.setattr(agent, "run_agent", stand_in)
    monkeypatch.setattr(subprocesses, "exit_with_parent", lambda: None)
    monkeypatch.setattr(subprocesses, "adopt_orphans", lambda: None)
    assert Agent(run.root)() == "preempted"
    assert heard == ["SIGUSR2"]


def test_an_agent_that_lives_shows_it_again_and_again(run: FakeRun) -> None:
    paths = paths_of(run, 0)
    file = paths.alive / "3"
    with HeartbeatFile(paths, 3, seconds=0.02):
        wait_for("a sign", file.exists, 5)
        file.unlink()
        wait_for("another sign", file.exists, 5)
    file.unlink()
    time.sleep(0.1)
    assert not file.exists()


def test_a_neighbour_that_shows_no_sign_of_life_any_more_is_lost(run: FakeRun) -> None:
    clock, paths = FakeClock(), paths_of(run, 0)
    neighbor, file = NeighborCheck(paths, 3, 180.0, clock), paths.alive / "3"

    def looks(seconds: int, touch: bool = False) -> str:
        """What is said at the end, looking every five seconds."""
        said = ""
        for _ in range(0, seconds, 5):
            if touch:
                os.utime(file, ns=(0, int(1e9 * clock.now())))
            said = neighbor.look()
            clock.sleep(5)
        return said

    assert looks(170) == ""
    file.parent.mkdir(parents=True)
    file.touch()
    assert looks(1000, touch=True) == ""
    assert looks(170) == ""
    file.parent.rename(paths.alive.with_name("away"))
    paths.alive.write_text("in the way: the disk fails, for everybody")
    assert looks(1000) == ""
    paths.alive.unlink()
    paths.alive.with_name("away").rename(paths.alive)
    clock.sleep(10_000)  # this agent was stopped itself
    assert looks(5) == ""
    assert looks(30).startswith("no sign of life for ")


def test_a_filesystem_that_fails_does_not_end_the_signs(run: FakeRun) -> None:
    paths = paths_of(run, 0)
    paths.root.mkdir(parents=True)
    paths.alive.write_text("in the way")
    with HeartbeatFile(paths, 0, seconds=0.02):
        time.sleep(0.1)
        paths.alive.unlink()
        wait_for("a sign", (paths.alive / "0").exists, 5)


def _fields(record: SubmittedJob, **changes: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__} | changes


def test_a_node_that_is_not_on_the_network_of_the_run_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.network_interfaces, "describe_interfaces", lambda: "eth0 10.0.0.5/24")
    assert agent._off_network(("10.0.0.5",), "eth0") == []
    (told,) = agent._off_network((), "ib0")
    assert told == "no interface that is up is on cluster.network=ib0 (there are: eth0 10.0.0.5/24)"


def local(rank: int, ranks: int, visible: str | None = None) -> Environment:
    return Environment(
        scheduler="local",
        job="l",
        restart=0,
        rank=rank,
        ranks=ranks,
        addresses=("127.0.0.2",),
        allocated=False,
        visible_gpus=visible,
    )


def gpu_plan(**resources: object) -> Plan:
    return make_plan(
        make_config(resources={"device": "cuda", "trainer": {"gpus": 1}, "inference": {"gpus": 1}} | resources)
    )


def test_virtual_nodes_claim_what_their_seats_need(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 900, 0, 0)
    paths, plan = paths_of(run, 0), gpu_plan(gpus_per_node=3, inference={"servers": 2, "gpus": 1})
    with ExitStack() as held:
        node_infos = [find_node(paths, plan, local(rank, plan.ranks), held) for rank in range(plan.ranks)]
        assert [([gpu.index for gpu in gpus], unfit) for gpus, unfit in node_infos] == [([0, 2, 3], ()), ([], ())]
        other = replace(paths, run_id="other")
        gpus, (problem,) = find_node(other, plan, local(0, plan.ranks), held)
    assert gpus == ()
    assert problem.startswith(
        f"3 GPUs needed, 0 of 4 free (GPU 0 is claimed by run {paths.run_id} (pid {os.getpid()} of "
    )
    assert "another process holds 0.9 GiB of GPU 1" in problem


def test_a_local_run_keeps_to_the_gpus_that_its_user_left_it(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 0, 0)
    with ExitStack() as held:
        gpus, _ = find_node(paths_of(run, 0), gpu_plan(), local(0, 3, visible="1,2"), held)
    assert [gpu.index for gpu in gpus] == [1]


def test_what_slurm_gave_is_not_claimed_but_must_be_free(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = give_gpus(monkeypatch, tmp_path, 0, 900)
    given = Environment(
        scheduler="slurm", job="7", restart=0, rank=0, ranks=1, addresses=("127.0.0.1",), visible_gpus="0,1"
    )
    with ExitStack() as held:
        gpus, unfit = find_node(paths_of(run, 0), gpu_plan(), given, held)
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert unfit == ("another process holds 0.9 GiB of GPU 1",)
    assert not folder.exists()


def test_a_run_without_gpus_claims_none(run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = give_gpus(monkeypatch, tmp_path, 900)
    with ExitStack() as held:
        assert find_node(paths_of(run, 0), make_plan(make_config()), local(0, 3), held) == ((), ())
    assert not folder.exists()


class Watched:
    """A supervisor whose roles end at once, and who notes what they were given and what others could still get."""

    seen: ClassVar[list[tuple[tuple[int, ...], str]]] = []
    variables: ClassVar[dict[str, str]] = {}

    def __init__(
        self, contexts: Sequence[RoleContext], *_arguments: object, variables: dict[str, str], **_options: object
    ) -> None:
        self.contexts = contexts
        Watched.variables = variables

    def run(self) -> End:
        given = tuple(gpu for context in self.contexts for gpu in context.placement.gpus)
        self.seen.append((given, missing_gpus(None, 1)))
        return "preempted"


@pytest.fixture
def gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A run of one trainer process and one server, on a machine of two GPUs."""
    give_gpus(monkeypatch, tmp_path, 0, 0)
    monkeypatch.setattr(agent, "Supervisor", Watched)
    monkeypatch.setattr(Watched, "seen", [])
    resources = {"device": "cuda", "gpus_per_node": 2, "services": {"nodes": 0}}
    config = make_config(
        resources=resources | {"trainer": {"gpus": 1}, "inference": {"gpus": 1}},
        model={"path": "tiny_qwen3", "init": "random"},
    )
    return FakeRun(tmp_path / "run", config)


def test_an_agent_holds_its_gpus_until_its_roles_are_down(gpu_run: FakeRun) -> None:
    assert run_agent(gpu_run.paths, local(0, 1), StopRequest()) == "preempted"
    ((given, lacking),) = Watched.seen
    assert given == (0, 1)
    assert lacking.startswith(f"1 GPU needed, 0 of 2 free (GPU 0 is claimed by run {gpu_run.identity.run_id} (pid ")
    assert missing_gpus(None, 2) == ""


def test_an_agent_whose_gpus_another_run_has_fails_and_says_whose_they_are(gpu_run: FakeRun) -> None:
    with ExitStack() as held:
        claim_visible(None, [1], Claimant(run_id="other-1f3a", attempt="local-0", pid=4711, user="ann"), held)
        with pytest.raises(RollcallError, match=r"2 GPUs needed, 1 of 2 free \(GPU 0 is claimed by run other-1f3a"):
            run_agent(gpu_run.paths, local(0, 1), StopRequest())
    assert Watched.seen == []
    assert missing_gpus(None, 2) == ""


@pytest.mark.parametrize("shared", [True, False])
def test_roles_that_share_a_gpu_get_the_multi_process_service(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 0)
    tool = tmp_path / "gpu-tools" / MPS_PROGRAM
    shutil.copy(Path(__file__).parents[2] / "fakes" / "mps_control.py", tool)
    tool.chmod(0o755)
    monkeypatch.setattr(agent, "Supervisor", Watched)
    resources = {"device": "cuda", "gpus_per_node": 1 if shared else 2, "colocate": shared, "mps": True}
    groups = {"trainer": {"gpus": 1}, "inference": {"gpus": 1}, "services": {"nodes": 0}}
    config = make_config(
        resources=resources | groups,
        inference={"gpu_memory": 0.4},
        model={"path": "tiny_qwen3", "init": "random"},
    )
    run = FakeRun(tmp_path / "run", config)
    assert run_agent(run.paths, local(0, 1), StopRequest()) == "preempted"
    assert (PIPES in Watched.variables) == shared
    assert not shared or not Path(Watched.variables[PIPES]).exists()
