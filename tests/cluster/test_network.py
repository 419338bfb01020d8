"""Nodes that are machines of their own: addresses, and a network that is cut."""

import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.cluster
PORT = "7070"


def test_every_rank_publishes_the_address_of_its_own_node(networked):
    code = (
        "import socket; from pipeline.utils import network_interfaces as there;"
        "print(socket.gethostname(), *there.candidate_addresses())"
    )
    shown = networked.run("srun", "-N4", sys.executable, "-c", code)
    assert sorted(shown.splitlines()) == [f"node{node} {networked.address(node)}" for node in range(4)]


def test_gloo_meets_across_nodes_on_the_proved_interface_although_hostnames_lead_nowhere(networked):
    trainer, server = _ranks(networked, bound=True)
    assert trainer == (0, ["sum 3.0"])
    assert server == (0, ["weights 3: 7000", "sum 3.0"])


def test_without_that_interface_gloo_takes_the_hostname_and_fails_while_weights_still_travel(networked):
    trainer, server = _ranks(networked, bound=False)
    assert 1 in (trainer[0], server[0])
    assert (trainer[1], server[1]) == ([], ["weights 3: 7000"])


def test_a_node_that_is_cut_off_goes_on_while_its_job_starts_elsewhere_and_comes_back_when_healed(networked):
    beats = networked.root / "beats"
    beat = f"while sleep 0.2; do echo ${{SLURM_RESTART_COUNT:-0}} $SLURMD_NODENAME >> {beats}; done"
    job = networked.submit(f"srun --kill-on-bad-exit=1 sh -c '{beat}'", "--nodes=2", "--requeue")
    fields = networked.wait_for_state(job, "RUNNING", WAIT_SECONDS)
    zombie = networked.nodes_of(fields)[-1]
    wait_for(
        "both ranks to beat", lambda: beats.exists() and len(set(beats.read_text().splitlines())) == 2, WAIT_SECONDS
    )
    networked.cut(zombie)
    networked.wait_for_restart(job, 1, WAIT_SECONDS)
    assert networked.node_states()[f"node{zombie}"] == "down*"
    fields = networked.wait_for_state(job, "RUNNING", WAIT_SECONDS)
    assert zombie not in networked.nodes_of(fields)

    def newest():
        return beats.read_text().splitlines()[-20:]

    wait_for("both lives to beat at once", lambda: {line.split()[0] for line in newest()} == {"0", "1"}, WAIT_SECONDS)
    assert f"0 node{zombie}" in newest()
    networked.heal(zombie)
    wait_for("the node to be taken back", lambda: networked.node_states()[f"node{zombie}"] == "idle", WAIT_SECONDS)
    wait_for("the zombie to end", lambda: _is_silent(beats, f"0 node{zombie}"), WAIT_SECONDS)
    networked.run("scancel", job)
    networked.wait_until_idle()


def test_a_node_that_loses_power_falls_silent_and_its_job_starts_elsewhere(networked):
    job = networked.submit("srun sh -c 'echo $SLURMD_NODENAME; exec sleep 120'", "--nodes=2", "--requeue")
    lost = networked.nodes_of(networked.wait_for_state(job, "RUNNING", WAIT_SECONDS))[-1]
    output = networked.root / f"{job}.out"
    wait_for("both ranks to speak", lambda: output.exists() and output.read_text().count("node") == 2, WAIT_SECONDS)
    networked.lose_node(lost)
    networked.wait_for_restart(job, 1, 90)
    assert lost not in networked.nodes_of(networked.wait_for_state(job, "RUNNING", WAIT_SECONDS))
    networked.run("scancel", job)
    networked.start_node(lost)
    networked.wait_until_idle(90)


def _ranks(networked, *, bound):
    """Exit code and lines of output of the trainer's side on node0, the server's on node1; one that fails ends both."""
    module = [sys.executable, "-m", "tests.cluster.gloo_ranks"]
    with ExitStack() as stack:

        def start(rank):
            arguments = [str(rank), networked.address(rank), networked.address(0), PORT, str(int(bound))]
            argv = networked.on_node(rank, [*module, *arguments])
            process = subprocess.Popen(argv, env=networked.env, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        ranks = [start(0), start(1)]
        wait_for("a rank to end", lambda: any(rank.poll() is not None for rank in ranks), 90)
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        outputs = [rank.communicate(timeout=30)[0].splitlines() for rank in ranks]
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def _is_silent(beats, line):
    before = beats.read_text().splitlines().count(line)
    time.sleep(1)
    return beats.read_text().splitlines().count(line) == before
