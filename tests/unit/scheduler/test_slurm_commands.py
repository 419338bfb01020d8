"""How Slurm's commands are called and read: without a Slurm, by texts that real ones said."""

import pickle
import time
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, SchedulerError
from slurm.scheduler.scheduler_protocol import Nodes, QueuedJob, user_name
from slurm.scheduler.scheduler_registry import connect_scheduler
from slurm.scheduler.slurm import slurm_commands
from slurm.scheduler.slurm.slurm_commands import (
    SlurmCommands,
    parse_gpus,
    parse_job,
    parse_partitions,
)

RECORD = (
    "JobId={id} {het}JobName={name} UserId=alice(1000) GroupId=users(100) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} "
    "BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:01 TimeLimit=365-00:00:00 TimeMin=N/A "
    "StartTime=2026-01-31T12:00:00 EndTime={ended} Deadline=N/A PreemptEligibleTime=2026-01-31T12:00:05 "
    "PreemptTime={preempted} Scheduler=Backfill "
    "Partition=low AllocNode:Sid=localhost:7368 NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "Socks/Node=* Features=(null) Command=/home/alice/my job.sh WorkDir=/home/alice Comment={comment}  "
    "AdminComment=Restarts=9 StdErr=/tmp/out.1 StdIn=/dev/null StdOut=/tmp/out.1 Power= "
)


def record(**fields: str) -> str:
    defaults = {"id": "12", "het": "", "name": "demo", "state": "RUNNING", "reason": "None", "restarts": "0"}
    defaults |= {"ended": "Unknown", "preempted": "None"}
    return RECORD.format(**{**defaults, "comment": "rollcall demo-1f3a"} | fields)


def put(folder: Path, name: str, script: str) -> None:
    """A command that does what the script says."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder on PATH, before those of the system."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_a_job_is_read_field_by_field() -> None:
    found = parse_job(record(state="PENDING", reason="Resources", restarts="3", comment="rollcall demo-1f3a x=y"))
    assert found == QueuedJob("12", "demo", "alice", "PENDING", "Resources", 3, "rollcall demo-1f3a x=y")


def test_none_and_null_are_nothing() -> None:
    found = parse_job(record(comment="(null)"))
    assert found is not None
    assert (found.reason, found.comment) == ("", "")


def test_the_leader_speaks_for_a_heterogeneous_job() -> None:
    first = record(id="12", het="HetJobId=12 HetJobOffset=0 ", state="RUNNING")
    second = record(id="13", het="HetJobId=12 HetJobOffset=1 ", state="COMPLETING")
    for said in (f"{first}\n{second}\n", f"{second}\n{first}\n"):
        found = parse_job(said)
        assert found is not None
        assert (found.id, found.state) == ("12", "RUNNING")


@pytest.mark.parametrize(
    ("said", "state", "live"),
    [
        ("CANCELLED by 0", "CANCELLED", False),
        ("CANCELLED+", "CANCELLED", False),
        ("COMPLETING", "COMPLETING", True),
        ("REQUEUE_HOLD", "REQUEUE_HOLD", True),
        ("NODE_FAIL", "NODE_FAIL", False),
        ("COMPLETED", "COMPLETED", False),
        ("SOMETHING_NEW", "SOMETHING_NEW", True),
    ],
)
def test_states_are_one_word_and_an_unknown_one_counts_as_live(said: str, state: str, live: bool) -> None:
    found = parse_job(record(state=said))
    assert found is not None
    assert (found.state, found.live) == (state, live)


@pytest.mark.parametrize(
    ("preempted_at", "ended_at", "preempted"),
    [
        ("2026-01-31T12:00:05", "2026-01-31T12:00:05", True),
        ("2026-01-31T12:00:05", "2026-01-31T12:00:35", False),  # its grace ran out, or it was cancelled meanwhile
        ("None", "2026-01-31T12:00:05", False),
        ("None", "Unknown", False),
    ],
)
def test_a_job_that_was_ended_at_once_for_another_is_told_from_one_that_was_cancelled(
    preempted_at: str, ended_at: str, preempted: bool
) -> None:
    job = parse_job(record(state="COMPLETING", preempted=preempted_at, ended=ended_at))
    assert job is not None
    assert job.preempted is preempted
    assert job.preempt_pending is (preempted_at != "None")


def test_a_name_cannot_pass_for_another_field() -> None:
    found = parse_job(record(name="Restarts=7", comment="JobState=COMPLETED", state="RUNNING"))
    assert found is not None
    assert (found.state, found.restarts) == ("RUNNING", 0)


def test_no_record_is_no_job() -> None:
    assert parse_job("") is None
    assert parse_job("No jobs in the system\n") is None


def test_a_record_without_its_fields_is_an_error() -> None:
    with pytest.raises(SchedulerError, match="names no number of restarts"):
        parse_job("JobId=12 JobName=demo")


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:2", {"": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0,2),shard:16", {"a100": 4}),
        ("gpu:a100:2(S:0),gpu:v100:1(S:1)", {"a100": 2, "v100": 1}),
        ("craynetwork:4,gpu:nvidia_h100_80gb_hbm3:8", {"nvidia_h100_80gb_hbm3": 8}),
        ("gpu:1g.5gb:7(S:0),gpu:1g.5gb:7(S:1)", {"1g.5gb": 14}),
        ("bandwidth:lustre:no_consume:4G", {}),
    ],
)
def test_gpus_of_a_node_are_counted_by_kind(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_lines_of_unlike_nodes_are_one_partition() -> None:
    said = (
        "cpu*|up|1-00:00:00|8|(null)|idle\ngpu|up|infinite|3|gpu:a100:4|mixed\ngpu|up|infinite|1|gpu:a100:4|drained*\n"
    )
    cpu, gpu = parse_partitions(said + "gpu|up|infinite|2|gpu:h100:8(S:0-1)|down~\nold|drain|2:00:00|0|(null)|n/a\n")[
        :2
    ]
    assert (cpu.name, cpu.default, cpu.up, cpu.nodes, cpu.gpus, cpu.time_limit) == (
        "cpu",
        True,
        True,
        8,
        "",
        "1-00:00:00",
    )
    assert (gpu.name, gpu.default, gpu.nodes, gpu.gpus) == ("gpu", False, 6, "4×a100, 8×h100")
    assert gpu.kinds == (Nodes(3, {"a100": 4}), Nodes(1, {"a100": 4}, down=1), Nodes(2, {"h100": 8}, down=2))


def test_a_partition_that_takes_no_jobs_is_not_up() -> None:
    said = (
        "a|up|1:00|1|(null)|idle\nb|down|1:00|1|(null)|idle\nc|drain|1:00|1|(null)|idle\nd|inact|1:00|1|(null)|idle\n"
    )
    assert [partition.up for partition in parse_partitions(said)] == [True, False, False, False]


@pytest.mark.parametrize("line", ["", "a|b", "low|up|1:00|many|(null)|idle"])
def test_what_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(SchedulerError, match="sinfo: cannot read"):
        parse_partitions(f"{line}\n")


def test_without_slurm_the_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    put(tmp_path, "sinfo", "true")
    with pytest.raises(ConfigError) as caught:
        connect_scheduler("slurm")
    assert caught.value.key == "cluster.scheduler"
    assert "Slurm's commands on PATH; sbatch, scontrol, squeue, scancel not found: log in to a node" in str(
        caught.value
    )


def test_with_its_commands_slurm_is_found(bin: Path) -> None:
    for name in slurm_commands.COMMANDS:
        put(bin, name, "true")
    assert isinstance(connect_scheduler("slurm"), SlurmCommands)


def test_a_command_that_does_not_answer_is_ended_at_its_deadline(bin: Path) -> None:
    put(bin, "scontrol", "exec sleep 60")
    began = time.monotonic()
    with pytest.raises(SchedulerError, match=r"^scontrol --oneliner show job 12: no answer within 0.3 s$"):
        SlurmCommands(seconds=0.3).job("12")
    assert time.monotonic() - began < 50


def test_a_command_that_is_missing_is_a_scheduler_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=r"^scancel 12: No such file or directory$"):
        SlurmCommands().cancel("12")
    assert SlurmCommands().accounts() is None, "a site without sacctmgr has no accounting"


def test_an_error_is_one_line_with_the_command_and_what_it_said_and_travels(bin: Path) -> None:
    put(bin, "scontrol", "echo 'scontrol: error: first' >&2; echo '  second' >&2; exit 1")
    with pytest.raises(SchedulerError) as caught:
        SlurmCommands().requeue("12")
    assert str(caught.value) == "scontrol requeue 12: first; second"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    put(bin, "scontrol", "exit 3")
    with pytest.raises(SchedulerError, match=r"scontrol requeue 12: exit code 3 without a message"):
        SlurmCommands().requeue("12")


def test_no_command_hears_of_a_job_around_it_or_of_a_user_s_defaults(
    bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ("SBATCH_PARTITION", "SINFO_FORMAT", "SQUEUE_USERS", "SCANCEL_STATE", "SCONTROL_ALL", "SLURM_JOB_ID")
    for name in theirs:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    for name in ("sbatch", "sinfo", "squeue", "scancel", "scontrol"):
        put(bin, name, f"env > {tmp_path}/{name}.env")
    slurm = SlurmCommands()
    slurm.test_only(tmp_path / "job.sh")
    slurm.cancel("12")
    slurm.requeue("12")
    assert slurm.partitions() == slurm.jobs_with("demo-1f3a") == []
    for name in ("sbatch", "sinfo", "squeue", "scancel", "scontrol"):
        heard = (tmp_path / f"{name}.env").read_text()
        assert "SLURM_CONF=/etc/slurm.conf\n" in heard
        assert not [variable for variable in theirs if f"{variable}=" in heard]


def test_jobs_are_found_by_a_word_of_their_comment_each_once_and_only_live_ones(bin: Path) -> None:
    lines = (
        "12+0|rollcall demo-1f3a",
        "12+1|rollcall demo-1f3a",
        "14|rollcall demo-1f3a2",
        "15|(null)",
        "16|a|demo-1f3a b",
    )
    put(bin, "squeue", f'case "$*" in *--user={user_name()}*) printf "%s\\n" {" ".join(map(repr, lines))};; esac')
    leader = record(id="12", het="HetJobId=12 HetJobOffset=0 ")
    said = f"case $4 in 16) echo '{record(id='16', state='CANCELLED')}';; *) echo '{leader}';; esac"
    put(bin, "scontrol", said)
    assert [job.id for job in SlurmCommands().jobs_with("demo-1f3a")] == ["12"]


def test_words_are_never_read_by_a_shell(bin: Path, tmp_path: Path) -> None:
    put(bin, "scancel", f'printf %s "$1" > {tmp_path}/said')
    SlurmCommands().cancel("12; touch oops $(id)")
    assert (tmp_path / "said").read_text() == "12; touch oops $(id)"


def test_bytes_that_are_no_text_are_no_error(bin: Path) -> None:
    put(bin, "scontrol", f"printf '{record(comment='caf')}' | sed 's/caf/caf\\xe9/'")
    found = SlurmCommands().job("12")
    assert found is not None
    assert found.comment.startswith("caf")


def test_only_an_unknown_id_means_that_there_is_no_job(bin: Path) -> None:
    put(bin, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SlurmCommands().job("12") is None
    put(bin, "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        SlurmCommands().job("12")


def test_a_refusal_is_told_from_no_answer(bin: Path, tmp_path: Path) -> None:
    said = "sbatch: error: invalid partition specified: nope\\nallocation failure: Invalid partition name specified"
    put(bin, "sbatch", f"printf '{said}\\n' >&2; exit 1")
    refused = "invalid partition specified: nope; Invalid partition name specified"
    assert SlurmCommands().test_only(tmp_path / "job.sh") == refused
    put(bin, "sbatch", "echo 'allocation failure: Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(SchedulerError, match="Socket timed out"):
        SlurmCommands().test_only(tmp_path / "job.sh")
    put(bin, "sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    answers = [SlurmCommands().test_only(tmp_path / "job.sh", nodes_down=down) for down in (False, True)]
    assert answers == [slurm_commands.NO_SUCH_NODES, ""], "a job that only waits for a repair is not refused"
    put(bin, "sbatch", "echo 'sbatch: Job 12 to start at 2026-01-01T00:00:00' >&2; exit 0")
    assert SlurmCommands().test_only(tmp_path / "job.sh") == ""


def test_accounts_are_those_of_this_user_each_once(bin: Path) -> None:
    put(bin, "sacctmgr", f'case "$*" in *user={user_name()}*) printf "physics\\nbio\\nphysics\\n";; esac')
    assert SlurmCommands().accounts() == ["bio", "physics"]


def test_a_site_without_accounting_has_no_accounts_and_one_that_is_silent_is_an_error(bin: Path) -> None:
    put(bin, "sacctmgr", "echo 'You are not running a supported accounting_storage plugin' >&2; exit 1")
    assert SlurmCommands().accounts() is None
    put(bin, "sacctmgr", "echo 'sacctmgr: error: Sending PersistInit msg: Connection refused' >&2; exit 1")
    with pytest.raises(SchedulerError, match="Connection refused"):
        SlurmCommands().accounts()


def test_the_time_between_term_and_kill_is_read(bin: Path) -> None:
    put(bin, "scontrol", "printf 'KillOnBadExit           = 0\\nKillWait                = 45 sec\\n'")
    assert SlurmCommands().kill_wait() == 45
    put(bin, "scontrol", "echo nothing")
    with pytest.raises(SchedulerError, match="names no KillWait"):
        SlurmCommands().kill_wait()
