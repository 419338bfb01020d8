"""Real processes meet in a real directory, and some of them are killed, stopped or doubled on the way."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from pipeline.topology.plan import NodeInfo, World
from pipeline.utils.shared_dir import FileSharedDir
from slurm.rendezvous import probe_server as beacons
from slurm.rendezvous.probe_server import CALLERS, ProbeServer, find_addresses
from slurm.rendezvous.rank_meeting import LeaderClaim, Lease
from tests.fakes.ranks import make_node_infos
from tests.patience import WAIT_SECONDS
from tests.protocol.shared_time import SharedTime

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SECONDS, LEASE = 8.0, 2.0
"""On the time that the ranks share, which stands while one of them does something."""
MAX_RANKS = 16

Rank = subprocess.Popen[str]


@dataclass
class Ranks:
    """Processes of four ranks, one of them spare, in the attempts below a directory."""

    root: Path
    path: Path
    time: SharedTime
    started: list[Rank] = field(default_factory=list)

    def start(self, rank: int, attempt: str = "7-0", hold: str = "", spares: int = 1) -> Rank:
        numbers = [str(number) for number in (rank, 4, spares, SECONDS, LEASE)]
        held = ["--hold", hold] if hold else []
        clock = [str(self.path), str(self.time.expect())]
        command = [
            sys.executable,
            "-m",
            "tests.protocol.rank",
            str(self.root / attempt),
            attempt,
            *numbers,
            *clock,
            *held,
        ]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.started.append(process)
        return process

    def start_all(self, attempt: str = "7-0") -> list[Rank]:
        return [self.start(rank, attempt) for rank in range(4)]

    def lead_and_hold(self) -> tuple[Rank, list[Rank]]:
        """A leader that is about to publish the world, and the others."""
        leader, *others = [self.start(0, hold="world.json"), *(self.start(rank) for rank in (1, 2, 3))]
        assert leader.stdout is not None
        assert leader.stdout.readline() == "holding\n"
        return leader, others

    def place(self, process: Rank) -> int:
        return self.started.index(process)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Starts ranks, and ends those that a test leaves."""
    with SharedTime(tmp_path / "time", MAX_RANKS) as time:
        made = Ranks(tmp_path, tmp_path / "time", time)
        yield made
        for process in made.started:
            process.kill()
            process.communicate(timeout=WAIT_SECONDS)


def world_of(process: Rank, told: str | None = None) -> World:
    """The world that a rank ended with, after it was told to go on, where it holds."""
    out, err = process.communicate(told, timeout=WAIT_SECONDS)
    assert process.returncode == 0, err
    return msgspec.json.decode(out.splitlines()[-1], type=World)


def test_four_processes_agree_on_one_world(ranks, tmp_path):
    worlds = [world_of(process) for process in ranks.start_all()]
    assert all(world == worlds[0] for world in worlds)
    assert [(place.rank, place.address) for place in worlds[0].placements] == [
        (0, "127.0.0.2"),
        (1, "127.0.0.3"),
        (2, "127.0.0.4"),
    ]
    left = {path.name for path in (tmp_path / "7-0").iterdir()}
    assert left == {"nodes", "claim-1.json", "lease-1.json", "world.json"}


def test_a_leader_killed_between_claim_and_world_is_succeeded_and_gets_no_role(ranks, tmp_path):
    leader, others = ranks.lead_and_hold()
    leader.kill()
    leader.wait(WAIT_SECONDS)
    ranks.time.leave_out(ranks.place(leader))
    worlds = [world_of(process) for process in others]
    assert all(world == worlds[0] for world in worlds)
    assert worlds[0].epoch >= 2
    assert worlds[0].leader != 0
    assert {place.rank for place in worlds[0].placements} == {1, 2, 3}


def test_a_leader_that_was_stopped_and_wakes_up_too_late_accepts_the_world_of_its_successor(ranks, tmp_path):
    leader, others = ranks.lead_and_hold()
    leader.send_signal(signal.SIGSTOP)
    ranks.time.leave_out(ranks.place(leader))
    worlds = [world_of(process) for process in others]
    ranks.time.pass_by(SECONDS)  # its own deadline has passed
    ranks.time.take_in(ranks.place(leader))
    leader.send_signal(signal.SIGCONT)
    assert world_of(leader, "go on\n") == worlds[0]
    assert worlds[0].leader != 0


def test_of_two_processes_with_one_rank_one_is_told_who_has_it(ranks):
    first, *others = [ranks.start(rank) for rank in (1, 0, 2, 3)]
    twin = ranks.start(1)
    worlds = [world_of(process) for process in others]
    outcomes = [process.communicate(timeout=WAIT_SECONDS) for process in (first, twin)]
    assert sorted(process.returncode for process in (first, twin)) == [0, 1]
    refused = outcomes[0][1] or outcomes[1][1]
    assert "RendezvousError: rank 1 of attempt 7-0 is taken" in refused
    assert all(world == worlds[0] for world in worlds)


def test_a_finished_attempt_beside_it_is_never_looked_at(ranks):
    old, *_ = [world_of(process) for process in ranks.start_all()]
    new, *_ = [world_of(process) for process in ranks.start_all("7-1")]
    assert (old.attempt, new.attempt) == ("7-0", "7-1")
    assert old.secret != new.secret


def test_claim_lease_and_node_record_that_strayed_from_an_old_attempt_do_no_harm(ranks, tmp_path):
    directory = FileSharedDir(tmp_path / "7-0")
    directory.create("claim-1.json", LeaderClaim(epoch=1, rank=2, hostname="ghost", pid=1))
    directory.create("lease-1.json", Lease(epoch=1, beat=9))
    directory.create("nodes/3.json", make_node_infos(4, attempt="6-0")[3])
    worlds = [world_of(process) for process in [ranks.start(rank) for rank in range(3)]]
    assert all(world == worlds[0] for world in worlds)
    assert worlds[0].epoch == 2
    assert {place.rank for place in worlds[0].placements} == {0, 1, 2}


def test_torn_files_are_waited_out(ranks, tmp_path):
    node_infos = tmp_path / "7-0" / "nodes"
    node_infos.mkdir(parents=True)
    for name in (node_infos / "3.json", node_infos.parent / "lease-1.json"):
        name.write_bytes(b"rollcall 400 00")
    worlds = [world_of(process) for process in [ranks.start(rank) for rank in range(3)]]
    assert {place.rank for place in worlds[0].placements} == {0, 1, 2}


def test_who_is_missing_is_named_by_all_who_came(ranks):
    for process in [ranks.start(rank, spares=0) for rank in range(3)]:
        _, err = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 1
        assert "rank 3" in err


def beacon_node_info(beacon: ProbeServer, rank: int, *addresses: str) -> NodeInfo:
    """A node record of attempt 7-0 that says where the beacon is."""
    return msgspec.structs.replace(
        make_node_infos(rank + 1, attempt="7-0")[rank], addresses=addresses or ("127.0.0.1",), probe_port=beacon.port
    )


def test_the_first_address_that_answers_is_found():
    with ProbeServer("run", "7-0", 2, "127.0.0.1") as beacon:
        assert find_addresses("run", [beacon_node_info(beacon, 2, "127.0.0.77", "127.0.0.1")]) == {2: "127.0.0.1"}


@pytest.mark.parametrize(("run", "attempt", "rank"), [("other", "7-0", 2), ("run", "6-0", 2), ("run", "7-0", 1)])
def test_the_beacon_of_another_run_attempt_or_rank_is_not_believed(run, attempt, rank):
    with ProbeServer(run, attempt, rank, "127.0.0.1") as beacon:
        assert find_addresses("run", [beacon_node_info(beacon, 2)]) == {}


def test_what_a_witness_reaches_counts_and_not_what_the_node_reaches_of_itself():
    with (
        ProbeServer("run", "7-0", 0, "127.0.0.2", "a") as leader,
        ProbeServer("run", "7-0", 3, "127.0.0.3", "b") as other,
    ):
        node_info = msgspec.structs.replace(beacon_node_info(leader, 0, "127.0.0.77", "127.0.0.2"), token="a")
        witness = msgspec.structs.replace(beacon_node_info(other, 3, "127.0.0.3"), token="b")
        assert find_addresses("run", [node_info], [witness]) == {0: "127.0.0.2"}
        silent = msgspec.structs.replace(witness, probe_port=other.port + 1, addresses=("127.0.0.78",))
        assert find_addresses("run", [node_info], [silent]) == {}
        assert find_addresses("run", [node_info], [silent, witness]) == {0: "127.0.0.2"}


def test_nobody_who_does_not_know_its_token_can_make_a_beacon_call_or_answer_for_it():
    with (
        ProbeServer("run", "7-0", 0, "127.0.0.2", "a") as leader,
        ProbeServer("run", "7-0", 3, "127.0.0.3", "b") as other,
    ):
        node_info, witness = beacon_node_info(leader, 0, "127.0.0.2"), beacon_node_info(other, 3, "127.0.0.3")
        assert find_addresses("run", [msgspec.structs.replace(node_info, token="guess")]) == {}
        assert find_addresses("run", [msgspec.structs.replace(node_info, token="a")], [witness]) == {}


def test_a_caller_that_says_nothing_keeps_nobody_waiting():
    with ProbeServer("run", "7-0", 2, "127.0.0.1") as beacon, socket.create_connection(("127.0.0.1", beacon.port)):
        assert find_addresses("run", [beacon_node_info(beacon, 2)], seconds=0.9) == {2: "127.0.0.1"}


@pytest.fixture
def strangers(monkeypatch):
    """Connects more callers that say nothing than a beacon has room for; no time-out hangs up on them."""
    monkeypatch.setattr(beacons, "ANSWER_SECONDS", 30.0)
    with ExitStack() as connected:

        def connect(beacon: ProbeServer, address: str) -> None:
            for _ in range(3 * CALLERS):
                connected.enter_context(socket.create_connection((address, beacon.port), timeout=WAIT_SECONDS))

        yield connect


def test_callers_that_say_nothing_take_few_threads_and_keep_no_peer_out(strangers):
    with ProbeServer("run", "7-0", 2, "127.0.0.1") as beacon:
        strangers(beacon, "127.0.0.1")
        assert find_addresses("run", [beacon_node_info(beacon, 2)], seconds=20) == {2: "127.0.0.1"}
        assert [thread.name for thread in threading.enumerate()].count("beacon's answer") < 2 * CALLERS


def test_a_peer_that_waits_for_its_answer_does_not_give_way_to_strangers(strangers):
    with (
        ProbeServer("run", "7-0", 0, "127.0.0.2") as leader,
        ProbeServer("run", "7-0", 3, "127.0.0.3") as other,
        socket.create_server(("127.0.0.4", 0)) as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        slow.settimeout(WAIT_SECONDS)
        node_info = msgspec.structs.replace(beacon_node_info(leader, 0, "127.0.0.4"), probe_port=slow.getsockname()[1])
        witness = beacon_node_info(other, 3, "127.0.0.3")
        found = pool.submit(find_addresses, "run", [node_info], [witness], 20)
        relayed, _ = slow.accept()
        strangers(other, "127.0.0.3")
        assert find_addresses("run", [witness], seconds=20) == {3: "127.0.0.3"}, "the strangers before it are in"
        with relayed, socket.create_connection(("127.0.0.2", leader.port), timeout=WAIT_SECONDS) as call:
            call.sendall(relayed.recv(4096))
            relayed.sendall(call.recv(4096))
        assert found.result(WAIT_SECONDS) == {0: "127.0.0.4"}


def test_a_closed_beacon_answers_nobody():
    with ProbeServer("run", "7-0", 2, "127.0.0.1") as beacon:
        node_info = beacon_node_info(beacon, 2)
    assert find_addresses("run", [node_info]) == {}
