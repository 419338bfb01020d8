"""What must be in a run directory to go on with the run, and how it is started over."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoints import Fence, TrainerState, newest_checkpoint
from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fencing import read_ownership
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.run_progress import copy_identity, mark_checkpointed
from pipeline.config import RunConfig
from pipeline.errors import RunStateError, SupersededError
from pipeline.roles.role_context import read_config
from pipeline.run.completion import finish, is_finished
from pipeline.run.metrics_log import MetricSinks
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files
from slurm.registry import run_registry
from slurm.registry.run_contents import located_config
from tests.fakes.composed_config import compose_cached
from tests.fakes.configs import make_config

WAYS_ON = r"; restore it, or start over with resume=scratch, which moves what is there to .*/aside$"


def demo(output: Path, *overrides: str) -> RunConfig:
    return compose_cached(["experiment=demo", f"output={output}", *overrides])


def begun(output: Path, *overrides: str, attempt: str = "a-0") -> RunPaths:
    """A run with an attempt that trained three steps and did not commit."""
    with run_registry.claimed_run(demo(output, *overrides)) as run:
        paths = run.attempt(run_registry.identity(run).run_id, attempt)
    for folder in paths.shared:
        folder.mkdir(parents=True)
    with MetricSinks(run.metrics, attempt) as sinks:
        for step in (1, 2, 3):
            sinks.log("train", "rl", step, {"loss": 1.0})
    return run


def trained(output: Path, *overrides: str, store: str = "") -> RunPaths:
    """The same, with a commit of these steps."""
    run = begun(output, *overrides)
    root = f"{store}/{run_registry.identity(run).run_id}" if store else str(run.checkpoints)
    Fence(root, "a-0").claim()
    copy_identity(run, root)
    complete_checkpoint(Storage(root), TrainerState(job="rl", step=3), "a-0", {}, 1)
    assert mark_checkpointed(run.attempt(run_registry.identity(run).run_id, "a-0"))
    run.ledger.write_text("{}\n{}\n")
    return run


def contents(run: RunPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file() and path.name != "live.lock"}


def refused(run: RunPaths, why: str) -> None:
    """Neither looking at the run nor submitting it changes a file."""
    before = contents(run)
    with pytest.raises(RunStateError, match=why):
        run_registry.examine(demo(run.root.parent))
    with pytest.raises(RunStateError, match=why), run_registry.claimed_run(demo(run.root.parent)):
        pass
    assert contents(run) == before


def test_a_run_with_a_commit_goes_on(tmp_path: Path) -> None:
    run = trained(tmp_path)
    before = run_registry.identity(run)
    assert run_registry.examine(demo(tmp_path)) == run
    with run_registry.claimed_run(demo(tmp_path)):
        assert run_registry.identity(run) == before


def test_the_copies_beside_the_checkpoints_are_not_taken_for_a_run(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert list(tmp_path.rglob("run.json")) == [run.run]


def test_a_run_that_has_not_committed_begins_again_without_a_word(tmp_path: Path) -> None:
    begun(tmp_path)
    with run_registry.claimed_run(demo(tmp_path)):
        pass


def test_a_run_whose_checkpoints_are_gone_is_not_started_over(tmp_path: Path) -> None:
    run = trained(tmp_path)
    shutil.rmtree(run.checkpoints)
    had = r"\(attempt a-0 committed, 3 lines of metrics.jsonl, 2 lines of ledger.jsonl\)"
    refused(run, rf"demo/checkpoints has no checkpoint to go on from, but the run had progress {had}{WAYS_ON}")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"{"), lambda path: path.write_bytes(b"")])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    run = trained(tmp_path)
    damage(run.checkpoints / "rl-3" / "a-0" / "COMPLETE")
    (run.attempts / "a-0" / "committed").unlink()
    refused(run, rf"the run had progress \(rl-3/a-0 is damaged, .*\){WAYS_ON}")


def test_rows_without_any_attempt_are_progress_that_was_lost(tmp_path: Path) -> None:
    run = trained(tmp_path)
    shutil.rmtree(run.attempts)
    with run_registry.claimed_run(demo(tmp_path)):
        pass  # the checkpoint is there
    shutil.rmtree(run.checkpoints)
    refused(run, rf"demo/attempts is missing, but the run had progress \(3 lines of metrics.jsonl, .*\){WAYS_ON}")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b'{"length": 3')])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_lost_identity_is_made_again(
    tmp_path: Path, damage: Callable[[Path], object], elsewhere: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"{tmp_path}/store" if elsewhere else ""
    overrides = [f"training.checkpoints={store}"] if elsewhere else []
    run = trained(tmp_path, *overrides, store=store)
    before = run_registry.identity(run).run_id
    damage(run.run)
    with run_registry.claimed_run(demo(tmp_path, *overrides)):
        assert run_registry.identity(run).run_id == before
    assert "run.json was lost, and is created again" in capsys.readouterr().err


def test_an_identity_that_nothing_else_tells_is_not_made_up(tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.run.unlink()
    (run.checkpoints / "RUN").unlink()
    (run.rendezvous / "demo-12345678").mkdir()
    refused(run, rf"demo/run.json is missing, and nothing else says the run's id{WAYS_ON}")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b'{"length": 3')])
def test_a_lost_config_is_made_again_and_still_keeps_another_one_out(
    tmp_path: Path, damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path)
    before = read_config(run)
    damage(run.config)
    with pytest.raises(RunStateError, match="seed: 0 → 5"), run_registry.claimed_run(demo(tmp_path, "seed=5")):
        pass
    with run_registry.claimed_run(demo(tmp_path)):
        assert read_config(run) == before
    assert "config.json was lost, and is created again" in capsys.readouterr().err


def test_a_config_without_a_copy_is_not_made_up(tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.config.unlink()
    (run.checkpoints / "CONFIG").write_bytes(b"")
    refused(run, rf"demo/config.json is missing, without a copy in .*/checkpoints{WAYS_ON}")


def test_a_run_is_started_over_on_demand_and_loses_nothing(tmp_path: Path) -> None:
    run = trained(tmp_path)
    first, zombie = run_registry.identity(run), Fence(str(run.checkpoints), "a-0")
    before = {path.relative_to(run.root): data for path, data in contents(run).items()}
    with run_registry.claimed_run(demo(tmp_path, "resume=scratch", "seed=5")):
        assert run_registry.identity(run).run_id != first.run_id
        assert run_registry.is_new(run)
        assert (read_config(run).seed, read_config(run).resume) == (5, "auto")
        assert not run.metrics.exists()
    moved = {path: (run.aside / "1" / path).read_bytes() for path in before}
    owners = {path for path in before if path.name == "OWNER" or path.parent.name == "ancestry"}
    assert {path: moved[path] for path in moved if path not in owners} == {
        path: before[path] for path in before if path not in owners
    }
    found = newest_checkpoint(str(run.aside / "1" / "checkpoints"))
    assert found is not None
    assert found.folder == "rl-3/a-0", "it counts where it was moved to"
    with pytest.raises(SupersededError):
        zombie.check()
    assert not read_ownership(Storage(str(run.checkpoints))).counts("rl-9", "a-0")
    begun(tmp_path, "seed=5", attempt="b-0")
    with run_registry.claimed_run(demo(tmp_path, "resume=scratch")):
        assert (run.aside / "2" / "attempts" / "b-0").exists()


def test_a_damaged_run_is_started_over_on_demand(tmp_path: Path) -> None:
    run = trained(tmp_path)
    for path in (run.run, run.config, run.checkpoints / "OWNER", run.checkpoints / "RUN"):
        path.write_bytes(b"{")
    with run_registry.claimed_run(demo(tmp_path, "resume=scratch")):
        assert run_registry.is_new(run)


def test_a_new_run_may_be_started_from_scratch_too(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path, "resume=scratch")) as run:
        assert not run.aside.exists()


def test_a_sweep_is_not_moved_aside(tmp_path: Path) -> None:
    manifest = SweepPaths(tmp_path / "demo").manifest
    manifest.parent.mkdir()
    manifest.touch()
    with (
        pytest.raises(RunStateError, match="a name that no sweep has"),
        run_registry.claimed_run(demo(tmp_path, "resume=scratch")),
    ):
        pass
    assert manifest.exists()


def test_a_damaged_end_is_no_end_and_is_written_again(tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.finished.write_bytes(b"{")
    assert not is_finished(run)
    assert run_registry.examine(demo(tmp_path)) == run
    end = Finished(time=1.0, steps=3, attempt="a-1")
    finish(run, end)
    finish(run, Finished(time=2.0, steps=4, attempt="a-2"))
    assert shared_files.read_document(run.finished, Finished) == end
    with pytest.raises(RunStateError, match="name=demo-2, or start over with resume=scratch"):
        run_registry.examine(demo(tmp_path))


def test_the_files_of_tasks_have_absolute_paths_so_that_a_run_continues_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "server.py").touch()
    harbor = {"name": "harbor", "options": {"path": "tasks", "eval_path": "absent"}}
    openenv = {"name": "openenv", "options": {"command": ["python", "server.py", "{port}"]}}
    mine = {"name": "my.module:Task", "options": {"path": "tasks"}}
    verifiers = {"name": "verifiers", "options": {"python": "server.py", "taskset": {"path": "tasks"}}}
    mixed = located_config(make_config(task={"name": "mix", "tasks": [harbor, openenv, mine, verifiers]})).task.tasks
    assert [entry.options for entry in mixed] == [
        {"path": str(tmp_path / "tasks"), "eval_path": "absent"},
        {"command": ["python", str(tmp_path / "server.py"), "{port}"]},
        {"path": "tasks"},
        {"python": str(tmp_path / "server.py"), "taskset": {"path": "tasks"}},
    ]
    assert located_config(make_config(task=harbor)).task.options["path"] == str(tmp_path / "tasks")


def test_the_image_of_a_sandbox_has_an_absolute_path_and_a_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for kind, image, located in (
        ("bubblewrap", "images", str(tmp_path / "images")),
        ("podman", "docker.io/library/python:3.12-slim", "docker.io/library/python:3.12-slim"),
        ("namespaces", "", ""),
    ):
        task = {"name": "code", "sandbox": {"kind": kind, "image": image}}
        assert located_config(make_config(task=task)).task.sandbox.image == located


def of_an_older_version(output: Path) -> RunPaths:
    """A run whose code lacks `inference.quantization` and `inference.speculation`."""
    run = trained(output)
    tree = shared_files.read_document(run.config, dict)
    assert tree is not None
    del tree["inference"]["quantization"], tree["inference"]["speculation"]
    shared_files.write_document(run.config, tree)
    return run


def test_a_run_of_an_older_version_gets_changes_but_no_keys_that_its_code_would_refuse(tmp_path: Path) -> None:
    run = of_an_older_version(tmp_path)
    with run_registry.claimed_run(demo(tmp_path, "inference.update_seconds=7")):
        tree = shared_files.read_document(run.config, dict)
    assert tree is not None
    assert tree["inference"]["update_seconds"] == 7
    assert not {"quantization", "speculation"} & tree["inference"].keys()


def test_a_key_that_a_runs_code_lacks_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    run = of_an_older_version(tmp_path)
    before = run.config.read_bytes()
    with (
        pytest.raises(RunStateError, match=r"whose code has inference\.speculation\.method .*from the checkout"),
        run_registry.claimed_run(demo(tmp_path, "inference.speculation.method=ngram")),
    ):
        pass
    assert run.config.read_bytes() == before


def test_a_run_of_an_older_version_that_has_not_begun_gets_new_keys_with_the_current_code(tmp_path: Path) -> None:
    with run_registry.claimed_run(demo(tmp_path)) as run:
        tree = shared_files.read_document(run.config, dict)
        assert tree is not None
        del tree["resources"]["mps"]
        shared_files.write_document(run.config, tree)
        (run.code / "slurm" / "batch" / "requeue.py").unlink()
        (run.code / "pipeline" / "errors.py").write_text("")
    assert run_registry.examine(demo(tmp_path, "resources.mps=true")) == run
    with run_registry.claimed_run(demo(tmp_path, "resources.mps=true")):
        assert read_config(run).resources.mps
    with run_registry.claimed_run(demo(tmp_path)):
        tree = shared_files.read_document(run.config, dict)
    assert tree is not None
    assert tree["resources"]["mps"] is False
    (run.attempts / "a-0").mkdir(parents=True)
    assert run_registry.examine(demo(tmp_path)) == run, "its code is whole"
