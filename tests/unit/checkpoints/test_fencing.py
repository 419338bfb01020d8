"""A trainer that was cut off writes nothing that a later attempt reads."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.checkpoints import Fence, newest_checkpoint
from pipeline.checkpoints.fencing import attempt_of, read_ownership, writer_of
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, SupersededError
from pipeline.run.metrics_log import MetricSinks
from pipeline.topology.plan import World
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.run_recorder import RunRecorder
from pipeline.train.train_jobs import jobs_of
from pipeline.utils import atomic_dirs, shared_files
from slurm.agent.agent import _finish
from slurm.registry import run_registry
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

REFUSED = r"attempt 12-1 has taken over .*checkpoints; attempt 12-0 must write nothing more"


class Ranks:
    """A dispatch that only remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.models: dict[str, object] = {}
        self.after_export: Callable[[], object] = lambda: None

    def save_hf_model(self, name: str, path: Path) -> None:
        """Writes a file; `after_export` is what happens before the export is over."""
        self.asked.append("save_hf_model")
        path.mkdir()
        (path / "model.safetensors").write_text(name)
        self.after_export()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self.asked.append(name)


class Trainer:
    """What the trainer of attempt 12-0 writes with."""

    def __init__(self, run: FakeRun) -> None:
        self.run, self.ranks, self.paths = run, Ranks(), run.attempt("12-0").paths
        self.commits = RunRecorder(self.paths, run.config, cast(RankGroup, self.ranks))
        self.commits.fence.claim()
        self.metrics = MetricSinks(run.paths.metrics, "12-0", check=self.commits.fence.check)

    def log(self) -> None:
        self.metrics.log("train", "rl", 1, {"loss": 1.0})

    def commit(self) -> None:
        self.commits.ledger.mark_done(0, "trained", 1)
        self.commits.save_checkpoint(jobs_of(self.run.config)[0], 1, ())

    def export(self) -> None:
        self.commits.export()

    def finish(self) -> None:
        world = World(run_id="r", attempt="12-0", epoch=1, leader=0, secret="s", placements=())
        _finish(self.run.paths, self.paths, self.run.config, world)


def commits_of(run: FakeRun, attempt: str) -> RunRecorder:
    return RunRecorder(run.attempt(attempt).paths, run.config, cast(RankGroup, Ranks()))


WRITES = [Trainer.log, Trainer.commit, Trainer.export, Trainer.finish]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", make_config(model={"path": "tiny_qwen3", "init": "random"}))


@pytest.fixture
def owner(run: FakeRun) -> Iterator[Trainer]:
    trainer = Trainer(run)
    with trainer.metrics:
        yield trainer


@pytest.fixture
def root(run: FakeRun) -> str:
    return str(run.paths.checkpoints)


@pytest.mark.parametrize("write", WRITES)
def test_a_zombie_is_refused_and_leaves_every_file_as_it_was(
    run: FakeRun, root: str, owner: Trainer, write: Callable[[Trainer], None]
) -> None:
    zombie = owner
    Fence(root, "12-1").claim()
    run.paths.metrics.write_bytes(b'{"torn')
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=REFUSED):
        write(zombie)
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before
    assert zombie.ranks.asked == []


def test_the_owner_may_write(run: FakeRun, owner: Trainer) -> None:
    for write in (Trainer.log, Trainer.export, Trainer.finish):
        write(owner)
    assert len(run.paths.metrics.read_text().splitlines()) == 1
    assert owner.ranks.asked == ["save_hf_model"]
    assert run.paths.finished.exists()


def test_a_disk_that_fails_for_a_moment_keeps_nobody_from_claiming(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, write = [OSError(errno.EIO, "Input/output error")], shared_files.write_atomic

    def failing_once(path: Path, data: bytes) -> None:
        if errors:
            raise errors.pop()
        write(path, data)

    monkeypatch.setattr(shared_files, "write_atomic", failing_once)
    fence = Fence(root, "12-0")
    fence.claim()
    assert not errors
    assert read_ownership(Storage(root)).owner == "12-0"


def test_the_attempt_of_another_job_takes_over(root: str) -> None:
    first, second = Fence(root, "12-3"), Fence(root, "7-0")
    first.claim()
    second.claim()
    second.check()
    with pytest.raises(CheckpointError, match="attempt 7-0 has taken over"):
        first.check()


def test_an_earlier_attempt_of_the_same_job_that_starts_late_takes_nothing_over(root: str) -> None:
    late, owner = Fence(root, "12-9"), Fence(root, "12-10")
    owner.claim()
    with pytest.raises(CheckpointError, match="attempt 12-10 has taken over"):
        late.claim()
    owner.check()


def test_a_late_attempt_of_an_older_job_takes_nothing_from_a_newer_job(run: FakeRun, root: str) -> None:
    run_registry.record_job(run.paths, "slurm", "13")
    commits_of(run, "13-0").restore()
    with pytest.raises(CheckpointError, match=r"attempt of job 13 has taken over .*; attempt 12-3 must write nothing"):
        commits_of(run, "12-3").restore()
    Fence(root, "13-0").check()


def test_an_older_job_does_not_even_begin_once_a_newer_one_is_submitted(run: FakeRun, root: str) -> None:
    run_registry.record_job(run.paths, "local", "local20250101")
    with pytest.raises(CheckpointError, match="attempt of job local20250101"):
        commits_of(run, "12-1").restore()
    assert not run.paths.checkpoints.exists()
    commits_of(run, "local20250101-0").restore()
    Fence(root, "local20250101-0").check()


def test_a_restarted_trainer_refuses_the_process_before_it_and_no_other_role_of_its_attempt(root: str) -> None:
    first, second = Fence(root, writer_of("12-0", 0)), Fence(root, writer_of("12-0", 1))
    actor = Fence(root, "12-0", any_restart=True)
    for fence in (first, second):
        fence.claim("12")
        actor.check()
    with pytest.raises(CheckpointError, match=r"attempt 12-0\.1 has taken over"):
        first.check()
    with pytest.raises(CheckpointError, match=r"attempt 12-0\.1 has taken over"):
        first.claim()
    Fence(root, writer_of("12-0", 11)).claim()
    with pytest.raises(CheckpointError, match=r"attempt 12-0\.11 has taken over"):
        Fence(root, writer_of("12-0", 2)).claim()
    actor.check()
    Fence(root, "12-1").claim()
    with pytest.raises(CheckpointError, match="attempt 12-1 has taken over"):
        actor.check()


def test_a_writer_names_its_attempt() -> None:
    assert [attempt_of(writer_of("a-b-3", restart)) for restart in (0, 7)] == ["a-b-3"] * 2


def test_an_exported_model_replaces_an_earlier_one_and_nothing_else_stays(run: FakeRun, owner: Trainer) -> None:
    torn = atomic_dirs.unfinished(run.paths.model, "11-0")
    for folder in (run.paths.model, torn):
        folder.mkdir()
        (folder / "old").touch()
    owner.export()
    assert [file.name for file in run.paths.model.iterdir()] == ["model.safetensors"]
    assert list(run.root.glob("*model*")) == [run.paths.model]


def test_a_zombie_that_hangs_while_its_model_gets_its_name_removes_nothing_of_the_next_owner(
    run: FakeRun, root: str, owner: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, later = Path.rename, atomic_dirs.unfinished(run.paths.model, "12-1")

    def hang(path: Path, target: Path) -> Path:
        if target == run.paths.model:
            Fence(root, "12-1").claim()
            later.mkdir()
            (later / "half").touch()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", hang)
    owner.export()
    assert (later / "half").exists()


def test_an_export_that_is_cut_short_between_its_renames_is_mended_by_the_next_attempt(
    run: FakeRun, owner: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.export()
    (run.paths.model / "old").touch()
    before, rename = sorted(run.paths.model.iterdir()), Path.rename

    def cut_short(path: Path, target: Path) -> Path:
        if target == run.paths.model:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", cut_short)
    with pytest.raises(KeyboardInterrupt):
        owner.export()
    assert not run.paths.model.exists()
    monkeypatch.undo()
    later = commits_of(run, "12-1")
    later.restore()
    assert sorted(run.paths.model.iterdir()) == before
    later.export()
    assert [file.name for file in run.paths.model.iterdir()] == ["model.safetensors"]
    assert list(run.root.glob("*model*")) == [run.paths.model]


def test_a_trainer_that_is_replaced_while_it_exports_leaves_the_model_alone(
    run: FakeRun, root: str, owner: Trainer
) -> None:
    run.paths.model.mkdir()
    owner.ranks.after_export = Fence(root, "12-1").claim
    with pytest.raises(CheckpointError, match=REFUSED):
        owner.export()
    assert list(run.paths.model.iterdir()) == []


def test_an_export_that_breaks_off_is_not_taken_for_a_model(run: FakeRun, owner: Trainer) -> None:
    def break_off() -> None:
        raise OSError("disk full")

    owner.ranks.after_export = break_off
    with pytest.raises(OSError, match="disk full"):
        owner.export()
    assert not run.paths.model.exists()


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: data.replace(b"12-1", b"12-0")]
)
def test_an_owner_that_cannot_be_read_keeps_everybody_out(root: str, damage: Callable[[bytes], bytes]) -> None:
    for attempt in ("12-0", "12-1"):
        Fence(root, attempt).claim("12")
    owner = Path(root) / "OWNER"
    owner.write_bytes(damage(owner.read_bytes()))
    for attempt in ("12-0", "12-1", "12-2"):
        for act in (Fence(root, attempt).check, Fence(root, attempt).claim, lambda: newest_checkpoint(root)):
            with pytest.raises(
                CheckpointError, match=r"OWNER is damaged, so who may write is not known: make sure that"
            ):
                act()


def test_a_damaged_ancestry_counts_nothing(root: str) -> None:
    Fence(root, "12-0").claim()
    Fence(root, "12-0").keep(["rl-1/11-0"])
    ancestry = Path(root) / "ancestry/12-0"
    ancestry.write_bytes(ancestry.read_bytes().replace(b"11-0", b"11-1"))
    message = (
        r"ancestry/12-0 is (damaged|missing), so which checkpoints count is not known: .*write the word anybody to .*"
    )
    with pytest.raises(CheckpointError, match=f"{message}OWNER"):
        newest_checkpoint(root)
    ancestry.unlink()
    with pytest.raises(CheckpointError, match=f"{message}OWNER"):
        newest_checkpoint(root)
    (Path(root) / "OWNER").write_text("anybody\n")
    assert read_ownership(Storage(root)).counts("rl-1", "11-1"), "it does what the error says"
    Fence(root, "12-1").claim()
    assert read_ownership(Storage(root)).counts("rl-1", "11-1")
    Fence(root, "12-1").keep(["rl-1/11-1"])
    assert not read_ownership(Storage(root)).counts("rl-2", "11-1")


def test_an_owner_that_got_lost_with_saves_there_keeps_everybody_out(root: str) -> None:
    fence = Fence(root, "12-0")
    fence.claim()
    (Path(root) / "OWNER").unlink()
    fence.check()
    assert read_ownership(Storage(root)).owner == "", "nobody has saved: nothing could be lost"
    (Path(root) / "rl-50" / "12-0").mkdir(parents=True)
    for act in (fence.check, Fence(root, "12-1").claim, lambda: newest_checkpoint(root)):
        with pytest.raises(CheckpointError, match=r"OWNER is missing, so who may write is not known: make sure that"):
            act()


def test_what_counted_before_a_claim_counts_until_the_owner_has_chosen(root: str) -> None:
    storage, (first, second, third) = Storage(root), (Fence(root, f"12-{restart}") for restart in range(3))
    assert read_ownership(storage).counts("rl-1", "anybody"), "nobody has claimed"
    first.claim()
    first.keep(["rl-1/11-0"])
    second.claim()
    third.claim()
    now = read_ownership(storage)
    assert all(now.counts(*each) for each in (("rl-1", "11-0"), ("rl-9", "12-0"), ("rl-9", "12-1"), ("rl-9", "12-2")))
    assert not now.counts("rl-2", "11-0")
    third.keep(["rl-9/12-0"])
    assert list(storage.sizes("ancestry")) == ["12-2"], "the ancestries before it are needed no more"
    with pytest.raises(SupersededError):
        second.keep(["rl-5/11-0"])
    now = read_ownership(storage)
    assert now.counts("rl-9", "12-0")
    assert now.counts("rl-10", "12-2")
    assert not any(
        now.counts(*each) for each in (("rl-10", "12-0"), ("rl-9", "12-1"), ("rl-1", "11-0"), ("rl-5", "11-0"))
    )


def test_an_attempt_may_claim_again_what_it_has(root: str) -> None:
    fence = Fence(root, "12-0")
    fence.claim()
    fence.claim()
    fence.check()
