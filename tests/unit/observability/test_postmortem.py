"""The archive of a failed attempt: what is in it, what never is, and that it neither grows, waits nor raises."""

import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipeline.observability import postmortem_archive as postmortem
from pipeline.observability.failure_verdict import verdict_of
from pipeline.observability.postmortem_archive import postmortem_of, read_end, write_postmortem
from pipeline.observability.postmortem_command import main
from pipeline.observability.run_history import attempt_names, read_attempt
from pipeline.roles.role_context import Status
from pipeline.run.events import Event
from pipeline.run.first_failure import FirstFailure
from pipeline.utils import shared_files
from slurm.agent.node_report import report_node
from tests.fakes.run_directory import BEGAN, FakeAttempt, FakeRun

PLANTED = {
    "variable": "planted-in-a-variable",
    "world": "planted-in-the-world",
    "node": "planted-in-a-node-record",
    "api": "tml-planted-as-a-key-of-the-api",
    "gateway": "planted-in-the-address-of-the-gateway",
    "config": "planted-in-the-config",
    "log": "planted-in-a-log",
    "url": "planted:in@a-url",
    "agent": "planted-in-an-agents-output",
    "failure": "planted-in-the-failure",
    "timeline": "planted-in-the-timeline",
    "event": "planted-in-an-event",
    "status": "planted-in-a-status",
}


@pytest.fixture
def failed(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> FakeAttempt:
    """A failed attempt with a secret in every text that an archive includes, and in those that it must not include."""
    monkeypatch.setenv("SOME_SERVICE_TOKEN", PLANTED["variable"])
    tree = msgspec.convert(shared_files.read_document(run.paths.config, dict), dict)
    tree["cluster"]["sbatch"] = {"export": f"WANDB_API_KEY={PLANTED['config']}"}
    shared_files.write_document(run.paths.config, tree)
    run.submit("local1", "local")
    attempt = run.attempt("local1-0")
    world = attempt.meet()
    world = msgspec.structs.replace(world, secret=PLANTED["world"])
    shared_files.write_document(attempt.paths.world, world)
    attempt.all_roles("starting", "ready")
    attempt.role("actor.0", 1, "ready", f"waits, password={PLANTED['status']}")
    attempt.role("trainer.0", 0, "stopping", f"Authorization: Bearer {PLANTED['timeline']}")
    attempt.train("rl", range(1, 40))
    gateway = {"url": "http://node1:8000", "secret": PLANTED["gateway"]}
    attempt.paths.logs.mkdir(parents=True)
    lines = [f"line {number}" for number in range(500)]
    lines += [f"OPENAI_API_KEY='{PLANTED['log']}'", f"GET https://{PLANTED['url']}@host/x", f"uses {PLANTED['world']}"]
    lines += [
        f"the value {PLANTED['variable']} alone",
        f"{world.password} {PLANTED['api']}",
        f"serves {gateway}",
        "x" * 50_000,
    ]
    lines += ["", "Stacks of process 71, whose role hangs:", 'File "a.py", line 1 in wait', f"token={PLANTED['log']}"]
    attempt.paths.log("trainer", 0).write_text("\n".join(lines))
    attempt.paths.log("actor", 0).write_text("actor line\n")
    run.paths.api.mkdir()
    shared_files.write_document(run.paths.api / "address.json", gateway)
    (run.paths.api / "key").write_text(f"{PLANTED['api']}\n")
    output = run.paths.submitit / "local1" / "77_0_log.out"
    output.parent.mkdir(parents=True)
    output.write_text(f"agent starts; secret: {PLANTED['agent']}\n")
    failure = FirstFailure(
        role="trainer.0",
        rank=0,
        cause=f"RuntimeError: CUDA out of memory; HF_TOKEN={PLANTED['failure']}",
        exit_code=1,
        time=run.now,
        log="",
    )
    shared_files.write_document(attempt.paths.first_failure, failure)
    attempt.tell("failed", "trainer.0", f"{failure.one_line()} api_key={PLANTED['event']}")
    attempt.live(2, BEGAN)
    report_node(attempt.paths, 0, {"trainer.0": ["process 0 (pid 71): last tick 1 s ago"]})
    return attempt


def contents(archive: Path) -> dict[str, str]:
    """The files of an archive by their names without its folder."""
    with tarfile.open(archive) as tar:
        return {
            member.name.partition("/")[2]: file.read().decode() for member in tar if (file := tar.extractfile(member))
        }


def test_the_archive_has_what_a_reader_of_a_bug_report_asks_for(failed: FakeAttempt) -> None:
    archive = write_postmortem(failed.paths)
    assert archive == failed.paths.postmortem
    files = contents(archive)
    readme = files["README.txt"]
    assert "Verdict: out of memory: trainer.0 on rank 0: RuntimeError: CUDA out of memory" in readme
    assert "lower training.micro_batch_tokens" in readme
    assert "  actor.0: 2026-01-01 " in readme
    assert "  agent.1: 2026-01-01 " in readme
    log = files["logs/trainer.0.log"].splitlines()
    assert (len(log), log[0]) == (200, "line 311")
    assert files["stacks/trainer.0.txt"].startswith("Stacks of process 71, whose role hangs:\n")
    assert "process 0 (pid 71): last tick 1 s ago" in files["nodes/0.txt"]
    assert "MemAvailable" in files["nodes/0.txt"]
    assert '"micro_batch_tokens"' in files["config.json"]
    assert "msgspec==" in files["versions.txt"]
    assert any("http://node1:8000" in line for line in log)
    assert "agent starts" in files["agents/77_0_log.out"]
    assert len(files["metrics.jsonl"].splitlines()) == 20
    assert "trainer.0 on rank" in files["timeline.txt"]


def test_no_planted_secret_is_in_the_archive(failed: FakeAttempt) -> None:
    files = contents(write_postmortem(failed.paths))
    everything = "\n".join([*files, *files.values()])
    for place, secret in PLANTED.items():
        assert secret not in everything, place
    assert failed.world is not None
    assert "in@a-url" not in everything
    assert everything.count("[removed]") > len(PLANTED)


def test_the_archive_is_bounded_and_says_what_it_leaves_out(
    failed: FakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmortem, "MAX_BYTES", 30_000)
    for number in range(40):
        failed.paths.log("inference", number).write_text("a line of some length\n" * 200)
    os.mkfifo(failed.paths.log("inference", 41))
    files = contents(write_postmortem(failed.paths))
    assert sum(map(len, files.values())) < 34_000
    assert "logs/inference.9.log: the archive has its" in files["README.txt"]
    assert "inference.41.log is no regular file" in files["README.txt"]
    assert max(len(line) for line in files["logs/trainer.0.log"].splitlines()) < 2100


def test_damaged_files_cost_only_themselves(failed: FakeAttempt) -> None:
    failed.run.paths.config.write_bytes(b"torn")
    failed.paths.outcome.write_bytes(b"\xff\x00")
    failed.run.paths.metrics.write_bytes(b"{")
    readme = contents(write_postmortem(failed.paths))["README.txt"]
    assert "config.json: damaged" in readme
    assert "outcome.json: damaged" in readme
    assert "Verdict: out of memory" in readme


def test_times_without_a_date_stop_no_archive(failed: FakeAttempt) -> None:
    event = Event(name="draining", by="x", time=1e300, detail="odd")
    shared_files.write_document(failed.paths.events / "9.json", event)
    shared_files.write_document(failed.paths.status("actor.0"), Status(state="ready", pid=1, time=-1.7e308))
    files = contents(write_postmortem(failed.paths))
    assert "— draining: odd (x)" in files["events.txt"]
    assert "actor.0: — ready" in files["README.txt"]


def test_a_folder_without_a_job_in_its_name_has_no_output_of_agents(failed: FakeAttempt) -> None:
    odd = replace(failed.paths, attempt=".nfs0001")
    odd.root.mkdir()
    assert not [name for name in contents(write_postmortem(odd)) if name.startswith("agents/")]


def test_a_folder_that_is_no_attempt_is_not_the_newest_one(
    failed: FakeAttempt, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".nfs0001", "odd", "\udcff-0"):
        (failed.run.paths.attempts / name).mkdir()
    failed.paths.log("\udcff", 0).write_text("a name that is no UTF-8")
    assert attempt_names(failed.run.paths) == ["local1-0"]
    assert main([f"run={failed.run.root}"]) == 0
    assert str(failed.paths.postmortem) in capsys.readouterr().out


def test_a_disk_that_takes_no_archive_gets_it_where_temporary_files_are(
    failed: FakeAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed.paths.postmortem.mkdir()
    monkeypatch.setattr(postmortem.tempfile, "gettempdir", lambda: str(tmp_path))
    archive = write_postmortem(failed.paths)
    assert archive == tmp_path / "rollcall-postmortem-demo-local1-0.tar.gz"
    assert archive.stat().st_mode & 0o777 == 0o600
    assert "README.txt" in contents(archive)


def test_an_ending_command_gets_the_archive_that_exists_or_none_and_no_error(
    failed: FakeAttempt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed.paths.postmortem.write_bytes(b"of the batch script")
    assert postmortem_of(failed.paths) == failed.paths.postmortem
    assert failed.paths.postmortem.read_bytes() == b"of the batch script"
    failed.paths.postmortem.unlink()

    def fail(_paths: object) -> Path:
        raise ValueError("a defect")

    monkeypatch.setattr(postmortem, "write_postmortem", fail)
    assert postmortem_of(failed.paths) is None
    assert "warning: no post-mortem: ValueError: a defect" in capsys.readouterr().out
    monkeypatch.setattr(postmortem, "write_postmortem", lambda _paths: time.sleep(60))
    monkeypatch.setattr(postmortem, "AUTOMATIC_SECONDS", 0.05)
    assert postmortem_of(failed.paths) is None


def test_the_last_lines_begin_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("the first password\nsecond\nthird\n")
    assert read_end(tmp_path / "a.log", 20) == "second\nthird\n"
    assert read_end(tmp_path / "a.log", 99) == "the first password\nsecond\nthird\n"


@pytest.fixture
def plain(run: FakeRun) -> FakeAttempt:
    attempt = run.attempt("7-0")
    attempt.meet()
    return attempt


def test_ends_without_a_failure_record_have_a_verdict_too(plain: FakeAttempt) -> None:
    def verdict() -> tuple[str, str]:
        return verdict_of(read_attempt(plain.paths), BEGAN + 300)

    assert verdict()[0] == "unknown"
    plain.live(2, BEGAN + 290)
    assert verdict()[0] == "running"
    plain.live(1, BEGAN)
    assert verdict()[0] == "lost node"
    assert verdict()[1].startswith("no heartbeat of rank 0 for 300 s")
    plain.leave(0)
    plain.leave(1)
    plain.tell("draining", "agent.0", "SIGTERM")
    assert verdict()[0] == "preemption"
    assert verdict()[1].startswith("the attempt was asked to end: SIGTERM (agent.0); the same command resumes")
    plain.conclude("stopped", "rank 1 ended without an exit marker (exit code 137)")
    assert verdict()[0] == "lost node"
    plain.fail("actor.0", 1)
    assert verdict()[0] == "killed"


def test_the_command_prints_verdict_and_path_and_refuses_another_attempt(
    failed: FakeAttempt, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"run={failed.run.root}"]) == 0
    verdict, path = capsys.readouterr().out.splitlines()
    assert verdict.startswith("out of memory: trainer.0 on rank 0")
    assert Path(path) == failed.paths.postmortem.resolve()
    assert main([f"run={failed.run.root}", "attempt=local9-0"]) == 2
    assert "expected an attempt of this run; found there: local1-0" in capsys.readouterr().err
