"""The real programs of the roles under the signals of a scheduler, of their agent, and without their agent.

Slurm sends TERM, and whatever `scancel --signal` names, to every process of a step, also to those with sessions of
their own.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipeline.inference.vllm.server_command import server_environment
from pipeline.roles import TRAINER, RoleCommand, inference, redis
from pipeline.run.metrics_log import MetricSinks
from pipeline.topology.plan import Placement
from pipeline.tracking.metric_sinks import TrackerSink
from pipeline.train.controller.rank_process import FINAL_REPORT_SECONDS
from pipeline.utils import exec_shielded
from pipeline.utils.forked_process import ForkRequest
from pipeline.utils.heartbeat import HeartbeatBoard
from pipeline.utils.subprocesses import Child, hold_port, tail
from pipeline.utils.waiting import wait_for
from slurm.agent.liveness import LivenessMonitor
from slurm.agent.supervisor import role_command
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.processes import gone, runs
from tests.support.ranks import idle_ranks
from tests.support.runs.attempts import an_attempt
from tests.support.runs.launched import ROOT
from tests.support.servers.redis_attempts import a_redis
from tests.support.servers.vllm import SECRET, START_SECONDS, model_directory, port_of, tiny_config, world_file

pytestmark = pytest.mark.integration

STOP_SECONDS = 20
"""More than an agent's 6: these machines are busy, and what counts is that nobody has to be killed."""

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "tests.support.ranks.idle_ranks"),
)


def family(pid: int) -> set[psutil.Process]:
    """A process and everything below it."""
    process = psutil.Process(pid)
    return {process, *process.children(recursive=True)}


def below(pid: int) -> int | None:
    """The one child of a process, once there is one."""
    children = psutil.Process(pid).children()
    return children[0].pid if children else None


def lives(pid: int, log: Path) -> bool:
    assert not gone(pid), tail(log)
    return True


def living(processes: set[psutil.Process]) -> set[psutil.Process]:
    return set(filter(runs, processes))


def hears(process: psutil.Process) -> set[str]:
    """Which of the scheduler's signals some thread of the process would be given."""
    heard: set[str] = set()
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        lines = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines() if ":\t" in line)
        deaf = int(lines["SigBlk"], 16) | int(lines["SigIgn"], 16)
        heard |= {number.name for number in exec_shielded.SHIELDED if not deaf >> (number - 1) & 1}
    return heard


def assert_deaf(pid: int) -> None:
    """Nothing of the family would be given a signal of the scheduler."""
    heard = {process.name(): hears(process) for process in family(pid)}
    assert {name: signals for name, signals in heard.items() if signals} == {}


def storm(pid: int, seconds: float = 1.0) -> None:
    """Send all that schedulers send, again and again; the processes of this program must survive it.

    A server that starts also runs other programs for a moment, such as `lscpu`. These may end by themselves.
    """
    program = program_of(pid)
    before = {process for process in family(pid) if program_of(process.pid) == program}
    assert before
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for process in before:
            for number in exec_shielded.SHIELDED:
                process.send_signal(number)
        time.sleep(0.1)
    assert living(before) == before


def program_of(pid: int) -> str:
    """Path of the program that a process runs; empty if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def wait_until_gone(processes: set[psutil.Process]) -> None:
    wait_for("the processes to end", lambda: not living(processes), 10, missing=lambda: str(living(processes)))


def ends_when_asked(child: Child) -> bool:
    """Whether INT ends the whole group without a KILL."""
    processes = family(child.pid)
    code = child.stop(STOP_SECONDS)
    wait_until_gone(processes)
    return code != -signal.SIGKILL


@contextmanager
def started(
    argv: Sequence[str], log: Path, extra: Mapping[str, str] | None = None, server: ForkRequest | None = None
) -> Iterator[Child]:
    child = Child(argv, log, {**os.environ, "OMP_NUM_THREADS": "1", **(extra or {})}, server)
    try:
        yield child
    finally:
        left = family(child.pid) if child.poll() is None else set()  # ranks of torchrun have sessions of their own
        child.kill()
        for process in living(left):
            process.kill()


@contextmanager
def forked_ranks(log: Path, extra: Mapping[str, str] | None = None) -> Iterator[Child]:
    """The ranks of `TORCHRUN` as those of a run: torchrun is forked by a fork server, and forks them."""
    with hold_port() as holder:
        port = str(port_of(holder))
        world = ("--nproc-per-node", "2", "--max-restarts", "0", "--master-addr", "127.0.0.1", "--master-port", port)
        program = (sys.executable, "-P", "-m", "pipeline.roles.held_port", port, "torch.distributed.run", *world)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        argv = (*program, "-m", "tests.support.ranks.idle_ranks")
        server = forks.request(TRAINER, nests=True)
        with started(argv, log, {"PYTHONPATH": path, **(extra or {})}, server) as child:
            yield child


def wait_for_text(log: Path, text: str, child: Child) -> None:
    def told() -> bool:
        assert child.poll() is None, tail(log)
        return log.exists() and text in log.read_text()

    wait_for(f"{text!r} in {log.name}", told, WAIT_SECONDS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Sequence[str], Mapping[str, str], Callable[[], bool]]]:
    """How to start a vLLM server, with what environment, and whether it is healthy."""
    with hold_port() as holder:
        config = tiny_config(model_directory(tmp_path / "model", tied=True))
        place = Placement(role="inference", index=0, rank=0, address="127.0.0.9", ports=(port_of(holder),))
        variables = server_environment(config, place, world_file(tmp_path))
        command = inference.server_command(config, place)
        yield command, variables, lambda: inference.is_healthy(place.address, place.ports[0], SECRET)


def test_redis_serves_through_a_storm_and_ends_well_when_asked(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child):
        assert_deaf(child.pid)
        storm(child.pid)
        assert redis.is_answering(context.placement.address, context.placement.ports[0], context.world.password)
        assert child.stop(STOP_SECONDS) == 0


def test_a_redis_that_is_stopped_is_found_by_asking_it(tmp_path: Path) -> None:
    with (
        a_redis(tmp_path, "7-0") as (context, child),
        closing(LivenessMonitor("redis.0", redis.launch(context), 2.0)) as monitor,
    ):
        monitor.probe.start()
        wait_for("an answer", lambda: monitor.probe.success_count, WAIT_SECONDS)
        assert monitor.watch(child.pid) is None
        os.kill(child.pid, signal.SIGSTOP)
        hang = wait_for("the hang", lambda: monitor.watch(child.pid), WAIT_SECONDS)
        assert "stopped (SIGSTOP)" in hang.cause
        os.kill(child.pid, signal.SIGCONT)


def test_actor_and_preprocessor_outlive_a_storm_and_end_well_when_asked(tmp_path: Path) -> None:
    with an_attempt(
        tmp_path, make_config(model={"path": "tiny_qwen3", "init": "random"}), (("127.0.0.1", 1),)
    ) as attempt:
        children = [attempt.start("preprocessor"), attempt.start("actor")]
        for child in children:
            assert_deaf(child.pid)
            storm(child.pid)
        assert [child.stop(STOP_SECONDS) for child in children] == [0, 0]


def test_actor_and_preprocessor_tell_that_their_work_goes_on(tmp_path: Path) -> None:
    config = make_config(model={"path": "tiny_qwen3", "init": "random"})
    with ExitStack() as stack:
        attempt = stack.enter_context(an_attempt(tmp_path, config, (("127.0.0.1", 1),)))
        for role in ("preprocessor", "actor"):
            board = stack.enter_context(closing(HeartbeatBoard(role_command(attempt.context(role)).has_heartbeat)))
            child = attempt.start(role, board.environment)
            before = board.read()[0]
            assert before.pid == child.pid
            wait_for("further beats", partial(beats_beyond, board, before.beats + 2), WAIT_SECONDS)


def beats_beyond(board: HeartbeatBoard, beats: int) -> bool:
    return board.read()[0].beats > beats


def test_a_server_outlives_storms_while_it_starts_and_serves_and_ends_with_its_agent(
    tmp_path: Path, server: tuple[Sequence[str], Mapping[str, str], Callable[[], bool]]
) -> None:
    command, variables, healthy = server
    with started(an_agent(tmp_path / "log", command), tmp_path / "agent.log", variables) as agent:
        child = wait_for("the server", lambda: below(agent.pid), START_SECONDS)
        wait_for("its engine", lambda: len(family(child)) > 1, START_SECONDS)
        assert_deaf(child)
        storm(child)
        wait_for("its health", lambda: lives(child, tmp_path / "log") and healthy(), START_SECONDS)
        assert_deaf(child)
        storm(child)
        assert healthy()
        processes = family(agent.pid)
        os.kill(agent.pid, signal.SIGKILL)
        wait_until_gone(processes)


def test_ranks_that_start_outlive_a_storm_and_end_when_asked(tmp_path: Path) -> None:
    with started(TORCHRUN, tmp_path / "log") as child:
        wait_for("both ranks", lambda: len(family(child.pid)) == 3, WAIT_SECONDS)
        storm(child.pid)
        assert ends_when_asked(child)


def test_ranks_that_are_ready_outlive_a_storm_and_end_when_asked(tmp_path: Path) -> None:
    with forked_ranks(tmp_path / "log") as child:
        wait_for_text(tmp_path / "log", idle_ranks.READY, child)
        # In addition to torchrun and the ranks: its fork server, and a keeper of each rank.
        assert len(family(child.pid)) == (6 if forks.request() else 3)
        storm(child.pid)
        assert ends_when_asked(child)


def test_ranks_that_started_with_exec_outlive_a_storm_and_end_with_their_agent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(an_agent(log, TORCHRUN), tmp_path / "agent.log") as agent:
        wait_for_text(log, idle_ranks.READY, agent)
        processes = family(agent.pid)
        assert len(processes) == 4
        storm(below(agent.pid))
        os.kill(agent.pid, signal.SIGKILL)
        wait_until_gone(processes)


def test_a_rank_that_is_stopped_is_found_and_named_and_torchrun_ends_when_one_is_lost_but_not_in_a_storm(
    tmp_path: Path,
) -> None:
    """Two tests that share the CPU time of one more torchrun, which the second ends."""
    monitor = LivenessMonitor("trainer.0", RoleCommand(TORCHRUN, lambda: True, 2), seconds=3.0)
    with closing(monitor), forked_ranks(tmp_path / "log", monitor.board.environment) as child:
        wait_for_text(tmp_path / "log", idle_ranks.READY, child)
        rank = monitor.board.read()[1]
        wait_for("it to wait", lambda: "orders" in monitor.board.read()[1].doing, WAIT_SECONDS)
        os.kill(rank.pid, signal.SIGSTOP)
        hang = wait_for("the hang", lambda: monitor.watch(child.pid), WAIT_SECONDS)
        assert hang.pid == rank.pid
        assert f"(pid {rank.pid})" in hang.cause
        assert "stopped (SIGSTOP)" in hang.cause
        stacks = monitor.stacks(child.pid)
        assert "in lead" in stacks[monitor.board.read()[0].pid]
        assert "in serve" in stacks[rank.pid]
        os.kill(rank.pid, signal.SIGCONT)

        storm(child.pid, FINAL_REPORT_SECONDS + 1)
        processes = family(child.pid)
        max(processes, key=lambda process: process.pid).kill()
        wait_for("torchrun to end", lambda: child.poll() is not None, STOP_SECONDS)
        wait_until_gone(processes)


def test_training_goes_on_when_the_storm_ends_wandb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own process is written in Go, whose runtime unblocks what the program handles."""
    run = FakeRun(tmp_path / "run", make_config(tracking={"mode": "offline"}))
    sink = TrackerSink("wandb", run.attempt("7-0").paths, "offline", {**os.environ, "HOME": str(tmp_path)}, 20)
    with caplog.at_level(logging.WARNING), MetricSinks(run.paths.metrics, "7-0", [sink]) as metrics:
        wait_for("wandb's own process", lambda: len(family(sink._child.pid)) > 1, WAIT_SECONDS)
        for process in family(sink._child.pid):
            for number in exec_shielded.SHIELDED:
                process.send_signal(number)
        for step in range(3):
            metrics.log("train", "rl", step, {"reward/mean": 0.5})
    assert len(run.paths.metrics.read_text().splitlines()) == 3
    assert len(caplog.messages) <= 1


def an_agent(log: Path, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.support.runs.an_agent", str(log), *command]
