"""What a rank learns from its scheduler's variables."""

from pathlib import Path

import pytest

from pipeline.errors import RendezvousError
from slurm.scheduler.local.local_environment import local_address, local_job_environment
from slurm.scheduler.scheduler_registry import batch_attempt, child_environment, detect_environment
from slurm.scheduler.slurm import slurm_environment
from slurm.scheduler.slurm.slurm_environment import submission_environment

SLURM = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
LOCAL = {"ROLLCALL_LOCAL_JOB": "local1", "SUBMITIT_LOCAL_GLOBALID": "2", "SUBMITIT_LOCAL_NTASKS": "4"}


def test_a_virtual_node_has_a_loopback_address_of_its_own() -> None:
    found = detect_environment(LOCAL)
    assert (found.attempt, found.rank, found.ranks) == ("local1-0", 2, 4)
    assert found.addresses == (found.interface,) == ("127.0.0.4",)


def test_addresses_go_on_beyond_the_last_byte() -> None:
    assert [local_address(rank) for rank in (0, 253, 254)] == [
        "127.0.0.2",
        "127.0.0.255",
        "127.0.1.0",
    ]


def test_a_requeue_is_another_attempt_of_the_same_job() -> None:
    assert detect_environment(SLURM).attempt == "812-0"
    assert detect_environment(SLURM | {"SLURM_RESTART_COUNT": "2"}).attempt == "812-2"


def test_all_components_of_a_job_are_one_attempt_of_its_leader() -> None:
    component = SLURM | {"SLURM_JOB_ID": "813", "SLURM_HET_JOB_ID": "812", "SLURM_RESTART_COUNT": "1"}
    assert detect_environment(component).attempt == "812-1"
    assert batch_attempt(component)[1:] == ("812", 1)


def test_a_local_job_has_no_batch_script() -> None:
    with pytest.raises(RendezvousError, match="belongs to no job of a scheduler"):
        batch_attempt(LOCAL)


def test_a_rank_knows_which_scheduler_started_it() -> None:
    assert [detect_environment(one).scheduler for one in (LOCAL, SLURM, SLURM | LOCAL)] == ["local", "slurm", "local"]


def test_gpus_that_slurm_did_not_give_are_not_used() -> None:
    assert detect_environment(SLURM).visible_gpus == ""
    assert detect_environment(LOCAL).visible_gpus is None


def test_the_gpus_that_a_user_left_to_a_local_run_are_known() -> None:
    assert detect_environment(LOCAL | {"CUDA_VISIBLE_DEVICES": "1"}).visible_gpus == "1"


def test_cuda_counts_the_gpus_of_a_role_as_nvidia_smi_does() -> None:
    assert child_environment({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_on_a_cluster_all_interfaces_are_bound_and_the_scheduler_s_gpus_are_kept() -> None:
    found = detect_environment(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found.interface == ""
    assert found.visible_gpus == "0,1"
    assert found.addresses


def test_without_a_scheduler_it_says_how_to_start() -> None:
    with pytest.raises(RendezvousError, match=r"start runs with rollcall submit"):
        detect_environment({})


def test_a_role_gets_no_variable_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**LOCAL, "ROLLCALL_LAUNCHER_PID": "1", "KEPT": "yes"}.items():
        monkeypatch.setenv(key, value)
    made = child_environment({"EXTRA": "1"})
    assert not [key for key in made if key.startswith(("SUBMITIT_", "ROLLCALL_LOCAL", "ROLLCALL_LAUNCHER"))]
    assert (made["KEPT"], made["EXTRA"], made["PYTHONSAFEPATH"]) == ("yes", "1", "1")


def test_a_role_does_not_take_the_job_s_tasks_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {**SLURM, "SRUN_CPUS_PER_TASK": "4", "PMI_RANK": "0", "PMIX_RANK": "0", "SLURMD_NODENAME": "n1"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "CUDA_VISIBLE_DEVICES": "0,1"}
    for key, value in (theirs | kept).items():
        monkeypatch.setenv(key, value)
    made = child_environment({})
    assert theirs.keys() & made.keys() == set()
    assert kept.items() <= made.items()


def test_a_job_submitted_from_within_a_job_begins_at_its_own_first_attempt() -> None:
    outer = {**SLURM, "SLURM_RESTART_COUNT": "3", "SUBMITIT_EXECUTOR": "slurm"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "PYTHONPATH": "/mine"}
    assert submission_environment(outer | kept) == kept


@pytest.mark.parametrize(
    "name",
    ["SBATCH_PARTITION", "SQUEUE_STATES", "SINFO_PARTITION", "SCANCEL_STATE", "SCONTROL_ALL", "SLURM_TIME_FORMAT"],
)
def test_a_user_s_defaults_do_not_reach_slurm_s_commands(name: str) -> None:
    assert submission_environment({name: "x", "SLURM_CLUSTERS": "big"}) == {"SLURM_CLUSTERS": "big"}


def test_a_job_imports_from_its_snapshot_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    made = local_job_environment("job", "command", 4, Path("/run/code"))
    assert made["PYTHONPATH"] == "/run/code:/mine"


def test_a_run_s_network_chooses_among_a_nodes_addresses_and_not_among_virtual_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_environment, "candidate_addresses", lambda: ("10.0.0.5", "10.1.0.5"))
    assert detect_environment(SLURM).addresses_on("10.1.0.0/16") == ("10.1.0.5",)
    assert detect_environment(SLURM).addresses_on("") == ("10.0.0.5", "10.1.0.5")
    assert detect_environment(LOCAL).addresses_on("ib0") == ("127.0.0.4",)
