"""The copy of the code in a run directory: damaged, lost, made again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

import pipeline
from pipeline.config import RunConfig
from pipeline.errors import RunStateError
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from slurm.registry import code_snapshot, run_contents, run_registry
from tests.fakes.composed_config import compose_cached


def demo(output: Path, *overrides: str) -> RunConfig:
    return compose_cached(["experiment=demo", f"output={output}", *overrides])


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run that has had an attempt."""
    with run_registry.claimed_run(demo(tmp_path)) as run:
        (run.attempts / "a-0").mkdir(parents=True)
    return run


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("name", ["pipeline/errors.py", "conf/config.yaml", ".hashes.json"])
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_damaged_copy_is_refused_and_made_again_once_it_is_removed(
    run: RunPaths, tmp_path: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = code_snapshot.digest(run)
    damage(run.code / name)
    said = rf"code is damaged \({name}\); restore these files, or remove the folder, .*resume=scratch"
    with pytest.raises(RunStateError, match=said):
        run_registry.examine(demo(tmp_path))
    with pytest.raises(RunStateError, match=said), run_registry.claimed_run(demo(tmp_path)):
        pass
    shutil.rmtree(run.code)
    with run_registry.claimed_run(demo(tmp_path)):
        assert code_snapshot.digest(run) == whole
    assert f"warning: {run.code} was lost, and is created again" in capsys.readouterr().err


def test_many_damaged_files_are_one_line(run: RunPaths, tmp_path: Path) -> None:
    shutil.rmtree(run.code / "conf")
    with pytest.raises(RunStateError, match=r"code is damaged \(conf/\S+, conf/\S+, conf/\S+ and \d+ more\)"):
        run_registry.examine(demo(tmp_path))


def test_what_an_attempt_leaves_in_the_copy_is_no_damage(run: RunPaths, tmp_path: Path) -> None:
    (run.code / "pipeline" / "__pycache__").mkdir()
    (run.code / "pipeline" / "__pycache__" / "errors.cpython-311.pyc").touch()
    assert run_registry.examine(demo(tmp_path)) == run


def test_code_that_is_edited_after_a_killed_submission_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(run_contents, "git_revision", killed)
        with pytest.raises(KeyboardInterrupt), run_registry.claimed_run(demo(tmp_path)):
            pass
    monkeypatch.setattr(code_snapshot, "PACKAGES", ("pipeline", "slurm"))  # an edited checkout
    with run_registry.claimed_run(demo(tmp_path)) as run:
        assert not (run.code / "conf").exists()
        assert run_registry.identity(run).code == code_snapshot.digest(run)


def test_a_lost_copy_is_not_replaced_by_other_code(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run.code)
    monkeypatch.setattr(code_snapshot, "PACKAGES", ("pipeline", "slurm"))
    said = r"the code that .*demo was made with; submit the run from the checkout .*, or start over with resume=scratch"
    for _ in range(2):
        with pytest.raises(RunStateError, match=said), run_registry.claimed_run(demo(tmp_path)):
            pass
        assert not [path for path in run.root.iterdir() if path.name.startswith("code")]
    with run_registry.claimed_run(demo(tmp_path, "resume=scratch")):
        assert run.code.exists()


def test_a_lost_copy_of_a_run_without_hashes_is_refused(run: RunPaths, tmp_path: Path) -> None:
    shared_files.write_document(run.run, structs.replace(run_registry.identity(run), code=""))
    shutil.rmtree(run.code)
    with pytest.raises(RunStateError, match=r"code is missing; restore it, or start over with resume=scratch"):
        run_registry.examine(demo(tmp_path))


def test_the_hashes_of_a_submission_that_was_killed_before_it_wrote_the_identity_count(
    run: RunPaths, tmp_path: Path
) -> None:
    shutil.rmtree(run.attempts)
    run.run.unlink()
    with run_registry.claimed_run(demo(tmp_path)):
        assert run_registry.identity(run).code == code_snapshot.digest(run) != ""


def test_only_files_of_conf_that_a_run_reads_count_as_changed(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(run.code, checkout)
    monkeypatch.setattr(pipeline, "__file__", str(checkout / "pipeline" / "__init__.py"))
    assert code_snapshot.changed_files(run) == []
    (checkout / "conf" / "experiment" / "mine.yaml").write_text("seed: 5")
    (checkout / "conf" / "data" / "mine.jsonl").write_text("{}")
    (checkout / "conf" / "config.yaml").write_text("seed: 5")
    assert code_snapshot.changed_files(run) == []
    changed = [checkout / "conf" / "models" / "tiny_qwen3" / "config.json", checkout / "pipeline" / "mine.py"]
    for path in changed:
        path.write_text("{}")
    assert code_snapshot.changed_files(run) == changed
