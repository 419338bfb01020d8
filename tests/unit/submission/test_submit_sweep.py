"""A sweep's life: expanded, checked as a whole, submitted in part, and submitted again."""

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import RunConfig
from pipeline.config.cross_checks import check_config
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError, RunStateError, SchedulerError
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.topology.plan import Plan
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK
from slurm.monitor.runs_overview import Overview
from slurm.registry import run_registry, sweep_manifest
from slurm.registry.sweep_manifest import MAX_NAME, Trial, extended, run_name
from slurm.submission import submit_run
from slurm.submission.compose_config import compose_config
from slurm.submission.submit_sweep import PointLauncher, sweep
from slurm.submission.sweep_trials import directory_of
from tests.fakes.launch import FakeLaunch

NAME = re.compile(str(RunConfig.model_fields["name"].metadata[0].pattern))
AXES = ("optim.lr=1e-4,3e-4", "loss=grpo,gspo")
NAMES = ["0-lr_0.0001-loss_grpo", "1-lr_0.0001-loss_gspo", "2-lr_0.0003-loss_grpo", "3-lr_0.0003-loss_gspo"]


@pytest.fixture
def fake() -> FakeLaunch:
    return FakeLaunch()


def command(output: Path, *overrides: str, cluster: str = "slurm") -> list[str]:
    return ["experiment=demo", "name=lr", f"output={output}", f"cluster={cluster}", *(overrides or AXES)]


def kept(output: Path) -> list[Trial]:
    found = sweep_manifest.load_manifest(SweepPaths(output / "lr"))
    assert found
    return list(found.points)


def test_every_point_becomes_a_run_below_the_sweep(tmp_path: Path, fake: FakeLaunch) -> None:
    assert sweep(command(tmp_path), fake.launch, detach=True) == 0
    assert fake.submitted == NAMES
    assert [(point.number, point.name, point.job) for point in kept(tmp_path)] == [
        (number, name, str(number + 1)) for number, name in enumerate(NAMES)
    ]
    assert all(RunPaths(tmp_path / "lr" / name).run.exists() for name in NAMES)
    found = sweep_manifest.load_manifest(SweepPaths(tmp_path / "lr"))
    assert found
    assert found.base == tuple(command(tmp_path)[:4])


def test_one_wrong_point_keeps_all_from_being_submitted(tmp_path: Path, fake: FakeLaunch) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(command(tmp_path, "loss=grpo,gspo", "optim.lr=1e-4,-1"), fake.launch, detach=True)
    assert str(caught.value).startswith("point loss=grpo optim.lr=-1: optim.lr=-1: expected greater than or equal to 0")
    assert fake.submitted == []
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_each_plan_once_and_leaves_nothing(
    tmp_path: Path, fake: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = ("loss=grpo,gspo", "resources.inference.nodes=2,3")
    assert sweep(command(tmp_path, *points), fake.launch, dry_run=True) == 0
    assert fake.shown == [("0-loss_grpo-nodes_2", True), ("1-loss_grpo-nodes_3", False)]
    told = capsys.readouterr().out
    assert "point 3 (loss=gspo resources.inference.nodes=3): 3-loss_gspo-nodes_3, as planned above" in told
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_again_submits_only_what_is_unfinished(
    tmp_path: Path, fake: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(command(tmp_path), fake.launch, detach=True)
    fake.end(tmp_path, NAMES[0], "COMPLETED")
    fake.end(tmp_path, NAMES[1], "FAILED")
    fake.end(tmp_path, NAMES[2], "CANCELLED")
    fake.submitted.clear()
    capsys.readouterr()
    assert sweep(command(tmp_path), fake.launch, detach=True) == 0
    assert fake.submitted == [NAMES[1], NAMES[2]]
    assert "4 points, 1 finished, 1 live, 2 to submit" in capsys.readouterr().out
    assert [point.job for point in kept(tmp_path)] == ["1", "5", "6", "4"]


def dependencies(fake: FakeLaunch, output: Path) -> list[str]:
    """What the job of each point waits for, as its run keeps it."""
    configs = [read_frozen_config(RunPaths(output / "lr" / name)) for name in NAMES]
    return [str(config.cluster.sbatch.get("dependency", "")) for config in configs if config]


def test_jobs_beyond_the_bound_wait_for_earlier_ones(tmp_path: Path, fake: FakeLaunch) -> None:
    assert sweep([*command(tmp_path), "cluster.max_jobs=2"], fake.launch, detach=True) == 0
    assert dependencies(fake, tmp_path) == ["", "", "afterany:1", "afterany:2"]


def test_jobs_that_are_live_already_count_for_the_bound(tmp_path: Path, fake: FakeLaunch) -> None:
    bounded = [*command(tmp_path), "cluster.max_jobs=3"]
    sweep(bounded, fake.launch, detach=True)
    fake.end(tmp_path, NAMES[0], "FAILED")
    fake.end(tmp_path, NAMES[2], "COMPLETED")
    assert sweep(bounded, fake.launch, detach=True) == 0  # jobs 2 and 4 are live
    assert dependencies(fake, tmp_path)[0] == ""
    fake.end(tmp_path, NAMES[0], "FAILED")
    assert sweep([*command(tmp_path), "cluster.max_jobs=1"], fake.launch, detach=True) == 0
    assert dependencies(fake, tmp_path)[0] == "afterany:4"


def test_a_bound_and_a_dependency_of_the_user_s_exclude_each_other(tmp_path: Path, fake: FakeLaunch) -> None:
    both = ("cluster.max_jobs=2", "cluster.sbatch.dependency=afterok:7")
    with pytest.raises(ConfigError, match=r"cluster\.sbatch\.dependency='afterok:7': expected no other dep"):
        check_config(compose_config([*command(tmp_path, "loss=grpo"), *both]))


def test_a_sweep_that_is_all_finished_submits_nothing(tmp_path: Path, fake: FakeLaunch) -> None:
    sweep(command(tmp_path), fake.launch, detach=True)
    for name in NAMES:
        fake.end(tmp_path, name, "COMPLETED")
    fake.submitted.clear()
    assert sweep(command(tmp_path), fake.launch) == 0
    assert fake.submitted == []


def test_a_submission_that_is_refused_half_way_is_taken_up_again(
    tmp_path: Path, fake: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refused = {NAMES[2]}
    assert sweep(command(tmp_path), fake.launch) == 1
    assert "submitted 2 of 4" in capsys.readouterr().err
    assert [(point.job, point.submitted > 0, point.refused) for point in kept(tmp_path)] == [
        ("1", True, ""),
        ("2", True, ""),
        ("", False, "sbatch: job submit limit reached"),
        ("", False, ""),
    ]
    lines = Overview(tmp_path, "lr", fake.find).look()
    assert [(line.state, line.live, line.failure) for line in lines[2:]] == [
        ("not submitted", False, "sbatch: job submit limit reached"),
        ("not submitted", False, ""),
    ]
    fake.refused.clear()
    assert sweep(command(tmp_path), fake.launch, detach=True) == 0
    assert fake.submitted == NAMES
    assert [point.refused for point in kept(tmp_path)] == [""] * 4


def test_a_signal_ends_a_submission_between_two_points(tmp_path: Path, fake: FakeLaunch) -> None:
    one = fake.launch

    def queue(config: RunConfig, plan: Plan) -> str:
        if config.name == NAMES[1]:
            signal.raise_signal(signal.SIGINT)
        return fake.submit(config, plan)

    assert sweep(command(tmp_path), PointLauncher(one.check, one.show, one.run, queue, one.connect)) == 1
    assert fake.submitted == NAMES[:2]
    assert [point.job for point in kept(tmp_path)] == ["1", "2", "", ""]


def test_new_points_join_under_new_numbers_and_known_ones_keep_theirs(tmp_path: Path, fake: FakeLaunch) -> None:
    sweep(command(tmp_path, "optim.lr=1e-4,3e-4"), fake.launch, detach=True)
    sweep(command(tmp_path, "optim.lr=0.0003,1e-3"), fake.launch, detach=True)
    assert [point.name for point in kept(tmp_path)] == ["0-lr_0.0001", "1-lr_0.0003", "2-lr_0.001"]
    assert fake.submitted == ["0-lr_0.0001", "1-lr_0.0003", "2-lr_0.001"]


@pytest.mark.parametrize("state", ["COMPLETED", "RUNNING", "FAILED"])
def test_points_keep_the_config_they_were_made_with(tmp_path: Path, fake: FakeLaunch, state: str) -> None:
    sweep(command(tmp_path), fake.launch, detach=True)
    for name in NAMES:
        fake.end(tmp_path, name, state)
    with pytest.raises(RunStateError, match=r"expected the config this point was made with, but seed: 0 → 7"):
        sweep([*command(tmp_path), "seed=7"], fake.launch, detach=True)


def test_operational_keys_may_change_between_submissions(tmp_path: Path, fake: FakeLaunch) -> None:
    sweep(command(tmp_path), fake.launch, detach=True)
    fake.end(tmp_path, NAMES[0])
    assert sweep([*command(tmp_path), "cluster.time=4:00:00"], fake.launch, detach=True) == 0
    assert fake.submitted == [*NAMES, NAMES[0]]


def test_a_scheduler_without_an_answer_is_an_error_and_never_a_dead_job(tmp_path: Path, fake: FakeLaunch) -> None:
    sweep(command(tmp_path), fake.launch, detach=True)
    fake.scheduler.fail("job")
    with pytest.raises(SchedulerError):
        sweep(command(tmp_path), fake.launch, detach=True)
    assert fake.submitted == NAMES


def test_a_run_and_a_sweep_cannot_share_a_name(tmp_path: Path, fake: FakeLaunch) -> None:
    (tmp_path / "lr").mkdir()
    RunPaths(tmp_path / "lr").run.touch()
    with pytest.raises(RunStateError, match="name=lr-sweep"):
        sweep(command(tmp_path), fake.launch)


@pytest.mark.parametrize("torn", [b"", b"{", shared_files.seal(b'{"base": [], "points": []}')])
def test_a_manifest_that_says_nothing_is_refused_and_not_replaced(
    tmp_path: Path, fake: FakeLaunch, torn: bytes
) -> None:
    (tmp_path / "lr").mkdir()
    there = SweepPaths(tmp_path / "lr").manifest
    there.write_bytes(torn)
    with pytest.raises(RunStateError, match="readable"):
        sweep(command(tmp_path), fake.launch)
    assert there.read_bytes() == torn


def test_a_sweep_runs_at_one_kind_of_place(tmp_path: Path, fake: FakeLaunch) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.scheduler='local, slurm': expected one scheduler for all points"):
        sweep([*command(tmp_path, "seed=1")[:3], "cluster=local,slurm"], fake.launch, detach=True)
    assert list(tmp_path.iterdir()) == []


def test_points_that_are_one_run_are_refused(tmp_path: Path, fake: FakeLaunch) -> None:
    with pytest.raises(ConfigError, match=r"expected points that differ; these two are the same run"):
        sweep(command(tmp_path, "optim.lr=1,1.0"), fake.launch, detach=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_starting_is_live(tmp_path: Path, fake: FakeLaunch, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_config([*command(tmp_path / "lr", "optim.lr=0.0001", cluster="local"), "name=0-lr_0.0001"])
    with run_registry.claimed_run(config, fake.find):
        assert sweep(command(tmp_path, "optim.lr=1e-4,3e-4", cluster="local"), fake.launch) == 0
    assert "2 points, 1 live, 1 to run" in capsys.readouterr().out
    assert fake.submitted == ["1-lr_0.0003"]


def test_two_submissions_at_once_are_one_and_an_error(tmp_path: Path, fake: FakeLaunch) -> None:
    def queue(config: RunConfig, plan: Plan) -> str:
        with pytest.raises(RunStateError, match="no other process is submitting"):
            sweep(command(tmp_path), fake.launch, detach=True)
        return fake.submit(config, plan)

    one = fake.launch
    assert sweep(command(tmp_path), PointLauncher(one.check, one.show, one.run, queue, one.connect), detach=True) == 0
    assert fake.submitted == NAMES


def test_points_must_agree_on_the_sweeps_name(tmp_path: Path) -> None:
    one, other = (compose_config(["experiment=demo", f"output={tmp_path}", f"name={name}"]) for name in ("a", "b"))
    assert directory_of([one, one]) == tmp_path / "a"
    with pytest.raises(ConfigError, match=r"name='a, b': expected one name for the sweep; set name="):
        directory_of([one, other])


def test_local_points_run_one_after_the_other_and_a_failed_one_stops_no_other(
    tmp_path: Path, fake: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.codes = {NAMES[1]: 1}
    assert sweep(command(tmp_path, cluster="local"), fake.launch) == 1
    assert fake.submitted == NAMES
    assert "3 finished" in capsys.readouterr().out
    fake.codes.clear()
    assert sweep(command(tmp_path, cluster="local"), fake.launch) == 0
    assert fake.submitted == [*NAMES, NAMES[1]]


@pytest.mark.parametrize("code", [129, 130, 143])
def test_an_interrupted_local_point_ends_the_sweep(tmp_path: Path, fake: FakeLaunch, code: int) -> None:
    fake.codes = {NAMES[1]: code}
    assert sweep(command(tmp_path, cluster="local"), fake.launch) == code
    assert fake.submitted == NAMES[:2]


def test_a_local_sweep_cannot_be_detached(tmp_path: Path, fake: FakeLaunch) -> None:
    with pytest.raises(ConfigError, match="--detach"):
        sweep(command(tmp_path, cluster="local"), fake.launch, detach=True)
    assert list(tmp_path.iterdir()) == []


def test_a_followed_sweep_ends_with_its_jobs_and_says_whether_all_finished(
    tmp_path: Path, fake: FakeLaunch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = iter(zip(NAMES, ["COMPLETED", "COMPLETED", "FAILED", "COMPLETED"], strict=True))
    monkeypatch.setattr(CLOCK, "sleep", lambda _seconds: fake.end(tmp_path, *next(ends)))
    assert sweep(command(tmp_path), fake.launch) == 1
    assert "3 finished, 1 interrupted (from the scheduler and files)" in capsys.readouterr().out


def test_leaving_a_followed_sweep_leaves_its_jobs(
    tmp_path: Path, fake: FakeLaunch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CLOCK, "sleep", leave)
    assert sweep(command(tmp_path), fake.launch) == 0
    assert "left; the jobs continue" in capsys.readouterr().out
    assert [job.state for job in fake.scheduler.jobs.values()] == ["PENDING"] * 4


def test_the_launcher_sweeps_with_multirun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_run.main(["-m", *command(tmp_path, cluster="local"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "4 points, 4 to run" in told
    assert [f"point {number} (optim.lr=" in told for number in range(4)] == [True] * 4
    assert told.count("trainer.0") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--multirun", "loss=grpo,gpo"], "error: point loss=gpo: loss='gpo': expected one of cispo"),
        (["--multirun", "loss=grpo,gspo", "--detach"], "error: option='--detach': expected cluster=slurm"),
        (["--multirun", "loss=grpo,gspo", "--cfg"], "error: option='--cfg': expected one run"),
        (["loss=grpo,gspo"], "error: loss='grpo,gspo': expected one value; -m submits one run for each value"),
    ],
)
def test_a_wrong_sweep_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_run.main([*command(tmp_path, "seed=1", cluster="local"), *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_sweeps_names_tell_its_overrides() -> None:
    assert run_name(3, ["optim.lr=0.0001", "loss=gspo"]) == "3-lr_0.0001-loss_gspo"
    assert run_name(0, ["optim.lr=1", "training.sft.lr=2"]) == "0-optim.lr_1-training.sft.lr_2"
    assert run_name(12, []) == "12"
    assert run_name(1, ["+task.options.digits=3", "model.path='/a b/c'"]) == "1-digits_3-path_a_b_c"


@given(st.integers(0, 10_000), st.lists(st.text(min_size=1), max_size=4))
def test_a_points_name_is_one_that_a_run_may_have(number: int, overrides: list[str]) -> None:
    name = run_name(number, overrides)
    assert NAME.match(name)
    assert len(name) <= MAX_NAME
    assert name.startswith(str(number))


points = st.lists(st.lists(st.sampled_from(["a=1", "a=2", "b=1", "b=2", "c=1"]), max_size=3, unique=True), max_size=6)


@given(points, points)
def test_points_keep_number_and_name_whatever_is_added(one: list[list[str]], other: list[list[str]]) -> None:
    first = extended(None, [], one)
    both = extended(first, [], other)
    assert both.points[: len(first.points)] == first.points
    assert [point.number for point in both.points] == list(range(len(both.points)))
    assert len({tuple(sorted(point.overrides)) for point in both.points}) == len(both.points)
    assert len({point.name for point in both.points}) == len(both.points)
    assert [sorted(point.overrides) for point in both.of(other)] == [sorted(overrides) for overrides in other]
