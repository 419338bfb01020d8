"""The batch file, word for word; what it quotes, and what it refuses."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import make_plan
from slurm.scheduler.allocation import components, cpus_needed
from slurm.scheduler.slurm.batch_file import batch_file
from tests.fakes.configs import make_config

RUN = RunPaths(Path("/runs/demo"))


def config_of(resources: dict[str, Any] | None = None, **cluster: Any) -> RunConfig:
    return make_config(name="demo", cluster={"scheduler": "slurm", **cluster}, resources=resources or {})


def text_of(config: RunConfig, run: RunPaths = RUN) -> str:
    folder = run.submitit / "slurm"
    command = f"/venv/bin/python -u -m submitit.core._submit {shlex.quote(str(folder))}"
    plan = make_plan(config)
    return batch_file(config, plan, run, run_id="demo-1f3a", folder=folder, python="/venv/bin/python", command=command)


def options_of(config: RunConfig) -> list[dict[str, str]]:
    """The options of each component, as they stand in the file."""
    parts = text_of(config).split("#SBATCH hetjob")
    lines = [[line.removeprefix("#SBATCH --") for line in part.splitlines() if "#SBATCH --" in line] for part in parts]
    return [dict(line.partition("=")[::2] for line in part) for part in lines]


ONE = """\
#!/bin/bash

#SBATCH --job-name=demo
#SBATCH --comment='rollcall demo-1f3a'
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --account=lab
#SBATCH --time=4:00:00
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --partition=gpu
#SBATCH --mem=64G
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=11
#SBATCH --gpus-per-node=h100:2
#SBATCH --licenses=matlab:1
#SBATCH --spread-job
#SBATCH --output=/runs/demo/submitit/slurm/%j_0_log.out
#SBATCH --open-mode=append

module load cuda
ulimit -n 65536

export PYTHONPATH=/runs/demo/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1 SUBMITIT_EXECUTOR=slurm

agent=(bash -c 'exec "$@" >>"$0/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1' /runs/demo/submitit/slurm \
/venv/bin/python -I -S -c 'import os, sys; from signal import *; pthread_sigmask(SIG_BLOCK, \
(SIGTERM, SIGUSR1, SIGUSR2)); os.execvp(sys.argv[1], sys.argv[1:])' \
/venv/bin/python -u -m submitit.core._submit /runs/demo/submitit/slurm)
trap : TERM USR1 USR2
code=0
srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task=11 --mpi=none "${agent[@]}" || code=$?

trap '' TERM USR1 USR2
/venv/bin/python -P -m slurm.batch.requeue /runs/demo "$code"
exit $?
"""

HET = """\
#!/bin/bash

#SBATCH --job-name=demo
#SBATCH --no-kill
#SBATCH --comment='rollcall demo-1f3a'
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --partition=cpu
#SBATCH --constraint=ib
#SBATCH --mem=16G
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=11
#SBATCH --output=/runs/demo/submitit/slurm/%j_0_log.out
#SBATCH --open-mode=append
#SBATCH hetjob
#SBATCH --job-name=demo
#SBATCH --no-kill
#SBATCH --comment='rollcall demo-1f3a'
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --partition=gpu
#SBATCH --nodelist='n[1-4]'
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=2

export PYTHONPATH=/runs/demo/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1 SUBMITIT_EXECUTOR=slurm

agent=(bash -c 'exec "$@" >>"$0/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1' /runs/demo/submitit/slurm \
/venv/bin/python -I -S -c 'import os, sys; from signal import *; pthread_sigmask(SIG_BLOCK, \
(SIGTERM, SIGUSR1, SIGUSR2)); os.execvp(sys.argv[1], sys.argv[1:])' \
/venv/bin/python -u -m submitit.core._submit /runs/demo/submitit/slurm)
trap : TERM USR1 USR2
code=0
srun --het-group=0 --kill-on-bad-exit=0 --no-kill --export=ALL --cpus-per-task=11 "${agent[@]}" : \
--het-group=1 --kill-on-bad-exit=0 --no-kill --export=ALL --cpus-per-task=2 "${agent[@]}" || code=$?

trap '' TERM USR1 USR2
/venv/bin/python -P -m slurm.batch.requeue /runs/demo "$code"
exit $?
"""


def test_the_file_of_a_job_whose_nodes_are_alike() -> None:
    resources = {"trainer": {"processes": 2, "threads": 4, "gpus": 1}, "inference": {"nodes": 2, "gpus": 2}}
    config = config_of(
        resources,
        partition="gpu",
        account="lab",
        time="4:00:00",
        gpu_type="h100",
        memory="64G",
        mail_user="me@example.org",
        mail_type="END,FAIL",
        setup=["module load cuda", "ulimit -n 65536"],
        sbatch={"licenses": "matlab:1", "spread_job": True, "overcommit": False},
        srun_args=["--mpi=none"],
    )
    assert text_of(config) == ONE


def test_the_file_of_a_job_of_two_components() -> None:
    resources = {"hetjob": True, "inference": {"gpus": 2}, "spare_nodes": 1}
    services = {"partition": "cpu", "constraint": "ib", "memory": "16G"}
    config = config_of(resources, partition="gpu", nodelist="n[1-4]", notice_seconds=60, services=services)
    assert text_of(config) == HET


def test_what_is_not_set_is_left_to_the_site() -> None:
    (options,) = options_of(config_of())
    asked = {"job-name", "comment", "requeue", "signal", "nodes", "ntasks-per-node", "cpus-per-task"}
    assert set(options) == asked | {"output", "open-mode"}


def test_without_notice_there_is_no_signal() -> None:
    (options,) = options_of(config_of(notice_seconds=0))
    assert "signal" not in options


def test_a_job_that_may_never_restart_is_not_requeued_by_slurm_either() -> None:
    (options,) = options_of(config_of(max_restarts=0))
    assert "no-requeue" in options
    assert "requeue" not in options


def test_every_node_has_the_cpus_of_the_most_demanding_seat() -> None:
    resources = {"trainer": {"processes": 2, "threads": 3}, "inference": {"servers": 3, "threads": 4}}
    config = config_of(resources)
    plan = make_plan(config)
    assert [cpus_needed(seat, config) for seat in plan.bundles] == [11, 7, 13]
    one = config.model_copy(update={"task": config.task.model_copy(update={"processes": 1})})
    assert cpus_needed(plan.bundles[0], one) == 4, "redis, preprocessor, one process of the task, agent"
    assert [part.cpus for part in components(config, plan)] == [13]


def test_cpus_that_are_set_are_taken() -> None:
    config = config_of({"hetjob": True}, cpus=16, services={"cpus": 3})
    assert [part["cpus-per-task"] for part in options_of(config)] == ["3", "16"]
    assert "--cpus-per-task=16" in text_of(config)


def test_services_use_the_job_s_partition_unless_they_have_one() -> None:
    assert [part["partition"] for part in options_of(config_of({"hetjob": True}, partition="main"))] == ["main"] * 2


def test_features_of_the_gpu_nodes_are_not_asked_of_the_services() -> None:
    first, second = options_of(config_of({"hetjob": True}, constraint="h100", memory="200G", exclude="n9"))
    assert ("constraint" in first, "mem" in first, first["exclude"]) == (False, False, "n9")
    assert (second["constraint"], second["mem"], second["exclude"]) == ("h100", "200G", "n9")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("nodes", "resources.nodes"),
        ("ntasks", "resources.nodes"),
        ("ntasks-per-node", "one agent"),
        ("requeue", "cluster.max_restarts"),
        ("no_requeue", "cluster.max_restarts=0"),
        ("open-mode", "logs"),
        ("signal", "cluster.notice_seconds"),
        ("job-name", "set name"),
        ("comment", "run_id"),
        ("output", "run directory"),
        ("partition", "set cluster.partition"),
        ("part", "set cluster.partition"),
        ("gres", "resources.trainer.gpus"),
        ("tasks-per-node", "one agent"),
        ("no_kill", "requeued"),
        ("mail_type", "cluster.mail_type"),
        ("gpus-per-node", "cluster.gpu_type"),
        ("wait", "leave --detach out"),
    ],
)
def test_an_option_that_contradicts_ours_is_refused_with_the_key_to_set(key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        text_of(config_of(sbatch={key: "1"}))
    assert caught.value.key == f"cluster.sbatch.{key}"
    assert hint in caught.value.hint


@pytest.mark.parametrize("key", ["p", "x=1 --nodes", ""])
def test_what_is_no_long_option_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="the long name of an option"):
        text_of(config_of(sbatch={key: "1"}))


def test_a_value_cannot_begin_another_line() -> None:
    with pytest.raises(ConfigError, match="one line"):
        text_of(config_of(constraint="a\n#SBATCH --nodes=1"))


@pytest.mark.parametrize("character", ["%", "\\", '"', "\n"])
def test_a_path_that_slurm_would_read_otherwise_is_refused(character: str) -> None:
    with pytest.raises(ConfigError, match="which Slurm reads as its own"):
        text_of(config_of(), RunPaths(Path(f"/runs/a{character}b/demo")))


@pytest.mark.parametrize("setup", [[], ["set -euo pipefail"]])
def test_the_script_passes_paths_whole_and_ends_with_the_epilogue_s_exit_code(setup: list[str], tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "it's $HOME; a `run`")
    folder = run.submitit / "slurm"
    folder.mkdir(parents=True)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    fake(binaries / "srun", 'while [ "$1" != bash ]; do shift; done', "SLURM_JOB_ID=7 SLURM_PROCID=2", '"$@"; exit 9')
    fake(binaries / "agent", 'echo "agent $1 in $PYTHONPATH"; grep SigBlk /proc/self/status')
    real = f'[ "$1" = -P ] || exec {shlex.quote(sys.executable)} "$@"'
    fake(binaries / "python", real, f'printf "%s\\n" "$@" >{shlex.quote(str(tmp_path / "epilogue"))}; exit 5')
    config = config_of(setup=setup)
    text = batch_file(
        config,
        make_plan(config),
        run,
        run_id="demo-1",
        folder=folder,
        python=str(binaries / "python"),
        command=f"{binaries / 'agent'} {shlex.quote(str(folder))}",
    ).replace("srun ", "SLURM_JOB_ID=7 SLURM_PROCID=2 srun ")
    ended = subprocess.run(["bash", "-c", text], env={"PATH": f"{binaries}:/bin:/usr/bin"}, timeout=30, check=False)
    assert ended.returncode == 5
    blocked = sum(1 << number - 1 for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    assert (folder / "7_2_log.out").read_text() == f"agent {folder} in {run.code}\nSigBlk:\t{blocked:016x}\n"
    assert (tmp_path / "epilogue").read_text().splitlines() == ["-P", "-m", "slurm.batch.requeue", str(run.root), "9"]


def fake(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    path.chmod(0o755)
