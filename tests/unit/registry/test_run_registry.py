"""Run directories: made, resumed, refused."""

import resource
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from pipeline.config import RunConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import ConfigError, RunStateError, SchedulerError
from pipeline.roles.role_context import read_config
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import ENDED, PENDING, RUNNING, JobQueue, QueuedJob
from tests.fakes.composed_config import compose_cached
from tests.fakes.scheduler import FakeScheduler
from tests.support.strangers import as_stranger, needs_another_user, shared_directory


def demo(output: Path, *overrides: str) -> RunConfig:
    return compose_cached(["experiment=demo", f"output={output}", *overrides])


def test_the_first_submission_freezes_config_identity_and_code(tmp_path: Path) -> None:
    config = demo(tmp_path)
    with run_registry.claimed_run(config) as run:
        assert run_registry.is_new(run)
        assert read_config(run).training == config.training
        assert run_registry.identity(run).run_id.startswith("demo-")
        assert (run.code / "pipeline" / "errors.py").exists()
        assert (run.code / "conf" / "config.yaml").exists()


def test_a_second_submission_keeps_the_identity(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        first = run_registry.identity(run)
    with run_registry.claimed_run(demo(tmp_path)) as run:
        assert run_registry.identity(run) == first


def test_another_config_is_refused_with_what_differs(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)):
        pass
    with (
        pytest.raises(RunStateError, match=r"seed: 0 → 5.*name=demo-2"),
        run_registry.claimed_run(demo(tmp_path, "seed=5")),
    ):
        pass


def test_a_live_run_is_refused_with_its_holder(tmp_path: Path) -> None:
    with (
        run_registry.claimed_run(demo(tmp_path)),
        pytest.raises(RunStateError, match=r"not live \(launcher: pid \d+ on "),
        run_registry.claimed_run(demo(tmp_path)),
    ):
        pass


def test_a_finished_run_says_how_to_start_a_new_one(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        shared_files.write_document(run.finished, Finished(time=0.0, steps=3, attempt="a-0"))
    with (
        pytest.raises(RunStateError, match="start a new run with name=demo-2"),
        run_registry.claimed_run(demo(tmp_path)),
    ):
        pass


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"output=.*a directory this user can write"),
        run_registry.claimed_run(demo(tmp_path / "file")),
    ):
        pass


def test_deadlines_and_sizes_may_change_and_the_new_ones_are_kept(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        first = run_registry.identity(run)
    changed = demo(tmp_path, "cluster.startup_seconds=900", "training.micro_batch_tokens=4096")
    with run_registry.claimed_run(changed) as run:
        assert run_registry.identity(run) == first
        assert read_config(run).cluster.startup_seconds == 900
        assert read_config(run).training.micro_batch_tokens == 4096


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@pytest.mark.parametrize("content", ["", "{}", "half of a docu"])
def test_a_torn_document_is_never_replaced(name: str, content: str, tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        pass
    torn = run.root / name
    torn.write_text(content)
    with (
        pytest.raises(RunStateError, match=rf"{name} is damaged, .*resume=scratch"),
        run_registry.claimed_run(demo(tmp_path)),
    ):
        pass
    assert torn.read_text() == content


def test_a_config_that_got_lost_after_an_attempt_is_not_made_up(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        (run.attempts / "a-0").mkdir(parents=True)
    run.config.unlink()
    with pytest.raises(RunStateError, match=r"config\.json is missing"), run_registry.claimed_run(demo(tmp_path)):
        pass


def test_a_submission_killed_before_it_wrote_the_identity_is_completed(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        run.run.unlink()
    with run_registry.claimed_run(demo(tmp_path)) as run:
        assert run_registry.identity(run).run_id.startswith("demo-")


def test_a_run_whose_code_is_of_another_version_is_refused(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        (run.attempts / "a-0").mkdir(parents=True)
        (run.code / "slurm" / "batch" / "requeue.py").rename(run.code / "slurm" / "requeue.py")
        (run.code / ".hashes.json").unlink()
        shared_files.write_document(run.run, structs.replace(run_registry.identity(run), code=""))
    with pytest.raises(RunStateError, match=r"slurm/batch/requeue.py, .*; submit it from the checkout .*name=demo-2"):
        run_registry.examine(demo(tmp_path))


def test_a_run_whose_keys_have_other_names_by_now_is_refused_but_sound(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        tree = shared_files.read_document(run.config, dict)
        assert tree is not None
        shared_files.write_document(run.config, {**tree, "an_earlier_name": tree.pop("seed")})
    with pytest.raises(RunStateError, match=r"an_earlier_name.*; submit it from the checkout .*name=demo-2") as refused:
        run_registry.examine(demo(tmp_path))
    assert "remove" not in str(refused.value)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ConfigError) as caught, run_registry.claimed_run(demo(tmp_path)):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.key == "output"
    assert "File too large" in str(caught.value)
    assert "\n" not in str(caught.value)
    with run_registry.claimed_run(demo(tmp_path)) as run:
        assert (run.code / "pipeline" / "errors.py").exists()


def test_examining_makes_nothing_and_refuses_what_claiming_refuses(tmp_path: Path) -> None:
    run_registry.examine(demo(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []
    with (
        run_registry.claimed_run(demo(tmp_path)) as run,
        pytest.raises(RunStateError, match=r"not live \(launcher: pid \d+ on "),
    ):
        run_registry.examine(demo(tmp_path))
    assert run_registry.examine(demo(tmp_path)) == run
    with pytest.raises(RunStateError, match="seed: 0 → 5"):
        run_registry.examine(demo(tmp_path, "seed=5"))
    shared_files.write_document(run.finished, Finished(time=0.0, steps=3, attempt="a-0"))
    with pytest.raises(RunStateError, match="not finished"):
        run_registry.examine(demo(tmp_path))
    run.config.write_bytes(b"")
    run.finished.unlink()
    with pytest.raises(RunStateError, match="is damaged"):
        run_registry.examine(demo(tmp_path))
    with pytest.raises(ConfigError, match="Not a directory"):
        run_registry.examine(demo(run.config))


def test_the_model_is_found_from_whatever_directory_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(BUILT_IN / "tiny_qwen3", tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    with run_registry.claimed_run(demo(tmp_path, "model.path=models/mine", "model.init=random")) as run:
        pass
    monkeypatch.chdir(tmp_path / "models")
    assert Path(read_config(run).model.path) == tmp_path / "models" / "mine"
    with run_registry.claimed_run(demo(tmp_path, "model.path=mine", "model.init=random")):
        pass


def test_a_run_has_a_job_while_its_lock_is_held_and_none_afterwards(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        assert run_registry.has_job(run), "a job that has not begun yet may still come"
        with run_registry.held_by_job(run):
            assert run_registry.has_job(run)
        assert not run_registry.has_job(run)


def test_a_run_whose_job_outlives_its_launcher_is_refused(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        pass
    with (
        run_registry.held_by_job(run),
        pytest.raises(RunStateError, match="not live"),
        run_registry.claimed_run(demo(tmp_path)),
    ):
        pass


def submitted(output: Path, scheduler: FakeScheduler, state: str = RUNNING, **fields: str) -> RunPaths:
    """A run whose job is in the queue."""
    with run_registry.claimed_run(demo(output)) as run:
        comment = f"rollcall {run_registry.identity(run).run_id}"
        run_registry.record_job(
            run, "slurm", scheduler.submit(**{"name": "demo", "comment": comment, "state": state} | fields)
        )
    return run


@pytest.mark.parametrize("state", [PENDING, RUNNING, "COMPLETING", "REQUEUE_HOLD", "SUSPENDED"])
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_run_with_a_live_job_is_refused_with_its_user_id_and_state(state: str, cluster: str, tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run = submitted(tmp_path, scheduler, state)
    said = rf"Slurm job 1 of alice is {state}\); end it \(rollcall cancel run={run.root}\).*name=demo-2"
    with pytest.raises(RunStateError, match=said):
        run_registry.examine(demo(tmp_path, f"cluster={cluster}"), lambda _: scheduler)
    with (
        pytest.raises(RunStateError, match=said),
        run_registry.claimed_run(demo(tmp_path, f"cluster={cluster}"), lambda _: scheduler),
    ):
        pass
    assert not run_registry.owns(run, "2"), "a refused submission leaves the job its run"


def test_a_pending_job_is_refused_with_what_it_waits_for(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    submitted(tmp_path, scheduler, PENDING)
    scheduler.set("1", PENDING, "Resources")
    with pytest.raises(RunStateError, match="is PENDING, Resources"):
        run_registry.examine(demo(tmp_path), lambda _: scheduler)


@pytest.mark.parametrize("state", [*sorted(ENDED), "forgotten"])
def test_a_run_whose_job_is_over_can_be_resumed_by_either_kind(state: str, tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run = submitted(tmp_path, scheduler)
    if state == "forgotten":
        scheduler.forget("1")
    else:
        scheduler.set("1", state)
    assert run_registry.examine(demo(tmp_path), lambda _: scheduler) == run
    assert not run_registry.owns(run, "2"), "looking changes nothing"
    with run_registry.claimed_run(demo(tmp_path, "cluster=slurm"), lambda _: scheduler), run_registry.job_replaced(run):
        assert run_registry.owns(run, "2"), "the next job may start before it is recorded"
        run_registry.record_job(run, "slurm", "2")
    assert run_registry.owns(run, "2")
    assert not run_registry.owns(run, "1"), "the earlier job, should it come back, is refused"


def test_a_submission_that_fails_leaves_the_record_of_who_ran_last(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run = submitted(tmp_path, scheduler, "FAILED")
    before = run_registry.submitted_job(run)

    def refused() -> None:
        with run_registry.claimed_run(demo(tmp_path), lambda _: scheduler), run_registry.job_replaced(run):
            assert run_registry.submitted_job(run) is None
            raise SchedulerError("sbatch refused the job")

    with pytest.raises(SchedulerError):
        refused()
    assert run_registry.submitted_job(run) == before


def test_a_job_that_is_not_on_record_is_found_by_its_run_id_before_another_is_submitted(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    with run_registry.claimed_run(demo(tmp_path), lambda _: scheduler) as run:
        job = scheduler.submit("demo", comment=f"rollcall {run_registry.identity(run).run_id}")
        scheduler.submit("demo", comment="rollcall demo-12345678")
    with pytest.raises(RunStateError, match=rf"not live \(Slurm job {job} of alice is PENDING\)"):
        run_registry.examine(demo(tmp_path, "cluster=slurm"), lambda _: scheduler)
    scheduler.fail("jobs_with")
    with pytest.raises(RunStateError, match=r"which is unknown for its Slurm jobs .*; try again where Slurm answers$"):
        run_registry.examine(demo(tmp_path, "cluster=slurm"), lambda _: scheduler)
    scheduler.cancel(job)
    assert run_registry.examine(demo(tmp_path, "cluster=slurm"), lambda _: scheduler) == run


def test_an_earlier_job_that_was_queued_again_by_hand_keeps_others_out(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run = submitted(tmp_path, scheduler, "FAILED")
    run_registry.record_job(run, "local", "local20250101")
    scheduler.set("1", PENDING)
    assert not run_registry.owns(run, "1")
    with pytest.raises(RunStateError, match="Slurm job 1 of alice is PENDING"):
        run_registry.examine(demo(tmp_path, "cluster=slurm"), lambda _: scheduler)


def test_a_comment_decides_whose_a_job_is_and_a_name_only_where_there_is_none(tmp_path: Path) -> None:
    run = submitted(tmp_path, FakeScheduler())
    run_id = run_registry.identity(run).run_id

    def is_ours(name: str, comment: str) -> bool:
        return run_registry.is_job_of(run, QueuedJob("1", name, "alice", RUNNING, comment=comment))

    assert is_ours("renamed", f"rollcall {run_id}")
    assert is_ours("demo", f"site: rollcall {run_id} checked")
    assert is_ours("demo", "")
    assert not is_ours("other", "")
    assert not is_ours("demo", f"rollcall {run_id}2")
    assert not is_ours("demo", "my own demo")


def test_a_scheduler_that_cannot_be_asked_never_means_that_the_job_is_over(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run = submitted(tmp_path, scheduler)
    scheduler.fail("job", said="Unable to contact slurm controller")
    with pytest.raises(RunStateError, match=r"which is unknown for Slurm job 1 of \S+ \(job: Unable to contact"):
        run_registry.examine(demo(tmp_path), lambda _: scheduler)

    def no_slurm(_name: str) -> JobQueue:
        raise ConfigError("cluster.scheduler", "slurm", "Slurm's commands on PATH")

    with pytest.raises(RunStateError, match=r"Slurm's commands on PATH.*remove .*job\.json"):
        run_registry.examine(demo(tmp_path), no_slurm)
    run.job.unlink()
    assert run_registry.examine(demo(tmp_path), no_slurm) == run, "without a job nobody is asked"


def test_a_job_of_somebody_else_that_got_the_same_id_keeps_nobody_out(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run = submitted(tmp_path, scheduler, name="other", comment="rollcall other-12345678")
    assert run_registry.live_job(run, scheduler) is None
    scheduler = FakeScheduler()
    scheduler.submit(name="renamed", comment=f"rollcall {run_registry.identity(run).run_id}", state=RUNNING)
    assert run_registry.live_job(run, scheduler) == scheduler.jobs["1"]


def test_a_record_of_a_job_that_cannot_be_read_is_never_passed_over(tmp_path: Path) -> None:
    run = submitted(tmp_path, FakeScheduler())
    run.job.write_bytes(b'{"length": 12')
    with pytest.raises(RunStateError, match=r"readable .*job\.json.*then remove"):
        run_registry.examine(demo(tmp_path), FakeScheduler)
    with pytest.raises(RunStateError, match=r"readable .*job\.json"):
        run_registry.owns(run, "1")


def test_a_local_job_is_no_matter_of_the_scheduler(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        run_registry.record_job(run, "local", "local20250101")
        assert run_registry.owns(run, "local20250101")
    scheduler = FakeScheduler()
    scheduler.fail("job")
    assert run_registry.live_job(run, scheduler) is None
    assert run_registry.examine(demo(tmp_path, "cluster=slurm"), lambda _: scheduler) == run


@pytest.mark.parametrize(("who", "mode"), [("owner", 0o700), ("group", 0o750)])
def test_strangers_do_not_get_into_a_run_directory(who: str, mode: int, tmp_path: Path) -> None:
    config = demo(tmp_path, f"cluster.readable_by={who}")
    config.directory.mkdir(mode=0o755)  # as an earlier version left it
    with run_registry.claimed_run(config) as run, run_registry.held_by_job(run):
        modes = {path.name: path.stat().st_mode & 0o777 for path in (run.root, run.lock, run.job_lock)}
    assert modes == {"demo": mode, "live.lock": 0o600, "job.lock": 0o600}


@needs_another_user
def test_a_stranger_cannot_lock_a_run_even_if_its_directory_is_open() -> None:
    with shared_directory() as output:
        with run_registry.claimed_run(demo(output)) as run:
            pass
        run.root.chmod(0o755)
        run.lock.chmod(0o644)  # as an earlier version left it
        with run_registry.claimed_run(demo(output)):
            run.root.chmod(0o755)
            held = as_stranger("import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH)", run.lock)
        assert "PermissionError" in held.stderr
