"""Whole runs that begin without a late server, and that continue on a spare node without a lost one."""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil
import pytest

from pipeline.roles.role_context import Status
from pipeline.run.metrics_log import read_rows
from pipeline.run.notices import read_notices
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import NodeInfo
from pipeline.utils import shared_files
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import PROMPTS, Launched, Launches

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.trial]

STEPS = 40
"""Enough that a server which joins during the run is used before its end."""


def test_a_run_begins_without_a_late_server_and_then_uses_it(launches: Launches) -> None:
    run = launches.submit("r", "resources.inference.nodes=3", "inference.min_servers=2", f"training.steps={STEPS}")
    run.wait_for_state("inference.2", "starting")
    run.wait("the server's process", lambda: bool(server_processes(run, "inference.2")), WAIT_SECONDS)
    late = server_processes(run, "inference.2")
    send(late, signal.SIGSTOP)
    run.wait_for_step(2)
    (quorum,) = read_notices(run.attempts[-1])
    assert quorum.text == "2 of 3 servers ready: rollouts begin"
    assert ("inference.2", "ready") not in run.history()
    send(late, signal.SIGCONT)
    run.wait_for_state("inference.2", "ready")
    run.wait("requests to the late server", lambda: is_busy(run, "inference.2"), WAIT_SECONDS)
    assert run.end() == 0, run.output()
    assert max(row.get("sync/servers", 0) for row in run.rows()) == 3  # a step before the first update has no number
    assert_each_step_once(run)


def test_a_spare_node_takes_over_a_killed_node_and_the_run_ends_with_every_step_once(launches: Launches) -> None:
    run = launches.submit("r", "resources.spare_nodes=1", f"training.steps={STEPS}")
    run.wait_for_step(3)
    lost = rank_of(run, "inference.1")
    doomed = [agent_of(run, lost), *processes_of(run, lost)]
    for process in doomed:
        process.kill()
    run.wait("the server on the spare", lambda: run.history().count(("inference.1", "ready")) == 2, WAIT_SECONDS)
    assert run.end() == 0, run.output()
    taken = next(notice.text for notice in read_notices(run.attempts[-1]) if "takes over" in notice.text)
    assert taken == f"rank 4 takes over inference.1 of rank {lost}, which is lost: killed by SIGKILL"
    ready = [name for name, state in run.history() if state == "ready" and name != "inference.1"]
    assert len(ready) == len(set(ready)), "no other role was restarted"
    assert run.rows()[-1]["sync/servers"] == 2, "the spare's server has the weights"
    assert_each_step_once(run)
    run.assert_nothing_left()


def test_a_spare_node_takes_over_the_trainer_of_a_killed_node_from_its_newest_checkpoint(launches: Launches) -> None:
    sft = ("training.steps=0", "training.sft.steps=60", "training.sft.batch=8", "training.checkpoint_every=5")
    run = launches.submit("sft", *sft, "resources.spare_nodes=1")

    def steps() -> list[int]:
        return [row["step"] for row in read_rows(run.run.metrics) if (row["kind"], row["job"]) == ("train", "sft")]

    run.wait("a checkpoint", lambda: len(list(run.run.checkpoints.glob("sft-*/*/COMPLETE"))) > 0, WAIT_SECONDS)
    doomed = [agent_of(run, 0), *processes_of(run, 0)]
    for process in doomed:
        process.kill()
    assert run.end() == 0, run.output()
    assert len(run.attempts) == 1
    assert run.history().count(("trainer.0", "ready")) == 2
    assert steps() == list(range(1, 61))
    newest = max(run.run.checkpoints.glob("sft-60/*/COMPLETE"))
    assert newest.parent.name.endswith(".1000"), "the spare's trainer is a later writer"
    (notice,) = read_notices(run.attempts[-1])
    assert notice.text == "rank 1 takes over trainer.0 of rank 0, which is lost: killed by SIGKILL"
    run.assert_nothing_left()


def assert_each_step_once(run: Launched) -> None:
    assert len(run.attempts) == 1
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    positions = [json.loads(line)["position"] for line in run.run.ledger.read_text().splitlines()]
    assert len(positions) == len(set(positions)) == STEPS * PROMPTS
    assert (RunPaths(run.run.root).model / "model.safetensors").exists()


def rank_of(run: Launched, name: str) -> int:
    return next(place["rank"] for place in run._world()["placements"] if f"{place['role']}.{place['index']}" == name)


def agent_of(run: Launched, rank: int) -> psutil.Process:
    node = shared_files.read_document(run.attempts[-1].rendezvous / "nodes" / f"{rank}.json", NodeInfo)
    assert node is not None
    return psutil.Process(node.pid)


def processes_of(run: Launched, rank: int) -> list[psutil.Process]:
    """All processes below an agent."""
    return agent_of(run, rank).children(recursive=True)


def server_processes(run: Launched, name: str) -> list[psutil.Process]:
    """The processes of a server: those that have its address and port in their command lines. A fork server may be
    their parent."""
    place = next(place for place in run._world()["placements"] if f"{place['role']}.{place['index']}" == name)
    parts = place["address"], str(place["ports"][0])

    def is_of_server(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return all(part in " ".join(process.cmdline()) for part in parts)
        return False

    return [process for process in run.processes() if is_of_server(process)]


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal those that still run: a starting server runs other programs for a moment."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_busy(run: Launched, name: str) -> bool:
    """Whether the actor reports that a server has worked on requests."""
    place = next(place for place in run._world()["placements"] if f"{place['role']}.{place['index']}" == name)
    status = shared_files.read_document(run.attempts[-1].status("actor.0"), Status)
    return status is not None and status.numbers.get(f"idle/{place['address']}:{place['ports'][0]}", 1.0) < 1
