"""What becomes of a trainer of jobs whose process is told to end."""

import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError, TrainingError
from pipeline.system.outages import OUTAGE_SECONDS
from pipeline.system.waiting import wait_for
from pipeline.training.standalone.log import JobLog, Line
from pipeline.training.standalone.stop import Stop
from slurm.batch import requeue
from slurm.launch import train
from slurm.launch.hearing import NOTICE, SIGNALS, heard
from slurm.launch.train import Interruption, QueuedTrainer, Trainer, executor_of, follow_logs, run_here
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.unit.training.test_jobs import SFT

RANK = """
import sys, time
from pathlib import Path
from typing import Any
from pipeline.training.standalone.log import JobLog
from pipeline.training.standalone.stop import Stop
stop = Stop(Path(sys.argv[1]))
Path(sys.argv[2]).touch()
for _ in range(400):
    time.sleep(0.02)
    if stop.asked and sys.argv[3] != "nothing":
        if sys.argv[3] == "tells":
            JobLog(Path(sys.argv[2]).with_name("sft.jsonl")).write("interrupted", step=1, of=4)
        stop.answer()
        sys.exit(sys.argv[3] == "fails")
"""


@pytest.fixture(autouse=True)
def plain_handlers() -> Iterator[None]:
    """Python's own handlers, whatever a shell or an earlier test left."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass(frozen=True)
class OneRank(Trainer):
    """A trainer whose only process waits until it is asked to stop; it answers, or not.

    `says`: `answers`, also `tells` its log, `fails` after its answer, or `nothing`.
    """

    says: str = "answers"

    def _command(self, stop: Stop) -> list[str]:
        return [sys.executable, "-c", RANK, str(stop.path), str(self.path / "here"), self.says]


@dataclass(frozen=True)
class Interrupted(QueuedTrainer):
    """A job of Slurm that `by` interrupted after so many steps."""

    by: signal.Signals
    steps: int

    def _train(self) -> Interruption:
        return Interruption(self.by, self.steps)


@dataclass(frozen=True)
class QueuedOneRank(OneRank, QueuedTrainer):
    """The same as a job of Slurm."""


def tell(path: Path, *numbers: signal.Signals) -> None:
    """Send these to this process once the rank is there."""

    def send() -> None:
        wait_for("the rank", (path / "here").exists, 30)
        for number in numbers:
            os.kill(os.getpid(), number)
            threading.Event().wait(0.1)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_trainer_that_is_told_to_end_ends_after_the_answer_with_the_signals_code(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path, number)
    assert run_here(OneRank(tmp_path, make_config())) == 128 + number
    said = capfd.readouterr().err.splitlines()
    assert said == [
        f"{number.name}: ending after this step, which is committed; Ctrl-C ends at once",
        f"ended by {number.name}; the same command goes on from here",
    ]


LAUNCHER = """
import os, sys
from pathlib import Path
from typing import Any
os.open(sys.argv[1], os.O_RDWR)  # the terminal of this session from now on, which sends HUP when it is closed
from slurm.launch.train import run_here
from tests.fakes.configs import make_config
from tests.unit.launch.test_interruptions import OneRank
sys.exit(run_here(OneRank(Path(sys.argv[2]), make_config(), says="tells")))
"""


def test_a_trainer_whose_terminal_is_closed_ends_after_the_answer_too(tmp_path: Path) -> None:
    (tmp_path / "sft.json").write_text(json.dumps(SFT))
    master, slave = pty.openpty()
    command = [sys.executable, "-c", LAUNCHER, os.ttyname(slave), str(tmp_path)]
    with subprocess.Popen(command, stdout=slave, stderr=slave, start_new_session=True) as launcher:
        try:
            os.close(slave)
            wait_for("the rank", (tmp_path / "here").exists, 30)
            os.close(master)
            assert launcher.wait(30) == 128 + signal.SIGHUP
        finally:
            launcher.kill()
    assert '"interrupted"' in (tmp_path / "sft.jsonl").read_text()


@dataclass
class FailingDisk:
    """What reading a job's log raises, from when the trainer is there, so many times."""

    number: int
    times: int
    raised: int = 0

    def attach(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = JobLog.new_lines

        def new_lines(log: JobLog) -> list[Line]:
            if (path / "here").exists() and self.raised < self.times:
                self.raised += 1
                raise OSError(self.number, os.strerror(self.number))
            return read(log)

        monkeypatch.setattr(JobLog, "new_lines", new_lines)


def test_a_log_that_cannot_be_read_for_a_moment_does_not_end_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sft.json").write_text(json.dumps(SFT))
    disk = FailingDisk(errno.EIO, times=2)
    disk.attach(tmp_path, monkeypatch)

    def interrupt() -> None:
        wait_for("the disk to fail", lambda: disk.raised == disk.times, 30)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run_here(OneRank(tmp_path, make_config(), says="tells")) == 128 + signal.SIGTERM
    assert "sft: interrupted, 1 of 4 steps are committed" in capsys.readouterr().out


def test_a_trainer_whose_log_cannot_be_read_any_more_commits_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sft.json").write_text(json.dumps(SFT))
    FailingDisk(errno.EACCES, times=1000).attach(tmp_path, monkeypatch)
    with pytest.raises(TrainingError, match=r"cannot be read: .*; what was done is committed; the same command"):
        run_here(OneRank(tmp_path, make_config()))


def test_a_disk_that_fails_for_too_long_is_not_followed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sft.json").write_text(json.dumps(SFT))
    (tmp_path / "here").touch()
    FailingDisk(errno.EIO, times=100_000).attach(tmp_path, monkeypatch)
    clock = FakeClock()
    assert "cannot be read" in follow_logs(tmp_path, lambda: False, clock).unread
    assert clock.now() >= OUTAGE_SECONDS


def test_a_trainer_that_fails_after_its_answer_was_interrupted_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path, signal.SIGTERM)
    assert run_here(OneRank(tmp_path, make_config(), says="fails")) == 128 + signal.SIGTERM
    assert "after the last commit the trainer exited with code 1" in capfd.readouterr().err


@pytest.mark.parametrize(("seconds", "expected"), [(0, []), (60, ["#SBATCH --signal=USR2@60"])])
def test_slurm_gives_notice_of_the_time_limit_only_if_it_is_asked_to(
    seconds: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "find_slurm", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: name)  # submitit looks for srun
    config = make_config(cluster={"kind": "slurm", "notice_seconds": seconds})
    text = executor_of(Trainer(tmp_path / "job.json", config))._make_submission_file_text("command", "uid")
    assert [line for line in text.splitlines() if "--signal" in line] == expected


EVERY_OPTION = {
    "kind": "slurm",
    "partition": "gpu",
    "account": "lab",
    "qos": "high",
    "time": "4:00:00",
    "constraint": "ib",
    "exclude": "node3",
    "nodelist": "node[1-2]",
    "reservation": "course",
    "exclusive": True,
    "gpu_type": "h100",
    "cpus": 12,
    "memory": "64G",
    "mail_user": "me@example.org",
    "mail_type": "END",
    "setup": ["module load cuda"],
    "sbatch": {"licenses": "matlab:1", "overcommit": False},
    "srun_args": ["--mpi=none"],
    "notice_seconds": 60,
    "max_restarts": 7,
}


def test_slurm_is_asked_for_all_that_the_config_says_of_a_job_that_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, script = asked_of_slurm(tmp_path, monkeypatch, EVERY_OPTION)
    assert set(options) - {line for line in options if line.startswith(("--output", "--error"))} == {
        *("--partition=gpu", "--account=lab", "--qos=high", "--time=4:00:00", "--constraint=ib", "--exclude=node3"),
        *("--nodelist='node[1-2]'", "--reservation=course", "--exclusive", "--gpus-per-node=h100:2", "--mem=64G"),
        *("--cpus-per-task=12", "--mail-user=me@example.org", "--mail-type=END", "--licenses=matlab:1", "--requeue"),
        *("--signal=USR2@60", "--nodes=1", "--ntasks-per-node=1", "--open-mode=append", "--job-name=test"),
    }
    assert "module load cuda" in script
    assert "--cpus-per-task=12 --mpi=none command" in script


def test_no_option_of_a_job_that_stands_alone_may_contradict_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.sbatch\.gres='gpu:1': expected an option that is not Roll"):
        asked_of_slurm(tmp_path, monkeypatch, {"kind": "slurm", "sbatch": {"gres": "gpu:1"}})


def test_torchrun_meets_in_a_private_file_and_unpickles_nothing_that_comes_over_a_port(tmp_path: Path) -> None:
    words = Trainer(tmp_path / "job.json", make_config())._command(Stop(tmp_path / "private" / "stop"))
    told = dict(pairwise(words))
    assert "--standalone" not in words
    assert (told["--rdzv-endpoint"], told["--rdzv-conf"]) == (
        str(tmp_path / "private" / "rendezvous"),
        "store_type=file",
    )
    assert words[-1] == str(tmp_path / "private" / "secret")


def asked_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any]) -> tuple[list[str], str]:
    """The options of sbatch that a job with these keys has, and its whole batch file."""
    monkeypatch.setattr(train, "find_slurm", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: name)  # submitit looks for srun
    config = make_config(cluster=cluster, resources={"trainer": {"processes": 2, "gpus": 1}})
    text = executor_of(Trainer(tmp_path / "job.json", config))._make_submission_file_text("command", "uid")
    return re.findall(r"^#SBATCH (.*)", text, re.MULTILINE), text


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tell(tmp_path, signal.SIGINT, signal.SIGINT)
    assert run_here(OneRank(tmp_path, make_config(), says="nothing")) == 130
    assert "the same command goes on from the last commit" in capfd.readouterr().err


def test_what_was_ignored_before_stays_ignored_and_handlers_come_back() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked: list[int] = []
    with heard(lambda: asked.append(1)) as told:
        os.kill(os.getpid(), signal.SIGHUP)
        assert told.by is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (told.by, asked) == (signal.SIGTERM, [1])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def end_on_node(by: signal.Signals, steps: int, restarts: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which jobs are queued again when a job of Slurm was interrupted."""
    queued: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(train, "find_slurm", lambda: None)
    monkeypatch.setattr(requeue, "queue_again", lambda scheduler, job, restart: queued.append(f"{job}-{restart}"))
    config = make_config(cluster={"kind": "slurm", "max_restarts": 3})
    with pytest.raises(SystemExit) as ended:
        Interrupted(Path("job.json"), config, by, steps)()
    assert ended.value.code == 128 + by
    return queued


def test_the_steps_of_an_earlier_attempt_are_not_told_or_counted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sft.json").write_text(json.dumps(SFT))
    earlier = JobLog(tmp_path / "sft.jsonl")
    earlier.write("step", step=1, of=4)
    earlier.write("failed", error="TrainingError: of the attempt before")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(requeue, "queue_again", lambda *_: "queued again")
    tell(tmp_path, NOTICE)
    with pytest.raises(TrainingError, match=r"the time limit came before the first step .* raise cluster\.time"):
        QueuedOneRank(tmp_path, make_config(cluster={"kind": "slurm"}))()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("by", "steps"), [(NOTICE, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 0)])
def test_an_interrupted_job_of_slurm_is_queued_again(
    by: signal.Signals, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end_on_node(by, steps, 2, monkeypatch) == ["7-2"]


def test_a_job_whose_time_limit_does_not_suffice_for_a_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match=r"raise cluster\.time"):
        end_on_node(NOTICE, 0, 0, monkeypatch)


def test_a_job_that_was_queued_again_too_often_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="max_restarts=3 times already"):
        end_on_node(signal.SIGTERM, 5, 3, monkeypatch)
