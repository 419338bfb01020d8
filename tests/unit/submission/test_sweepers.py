"""Hydra's sweepers drive runs: Optuna's, and Hydra's own, with a scheduler in memory."""

import math
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError, RunStateError, SweepError
from pipeline.run.metrics_log import MetricSinks
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.topology.plan import Plan
from pipeline.utils.waiting import Clock
from slurm.registry import file_locks, sweep_manifest
from slurm.submission import submit_run
from slurm.submission.sweeps.hydra_settings import read_sweeper_command, refuse_missing
from slurm.submission.sweeps.run_sweeper import run_sweeper
from tests.fakes.launch import FakeLaunch

AXIS = "optim.lr=tag(log,interval(1e-5,1e-1))"
OPTUNA = (
    "hydra/sweeper=optuna",
    "hydra.sweeper.direction=maximize",
    "hydra.sweeper.n_trials=4",
    "hydra.sweeper.n_jobs=2",
    "hydra.sweeper.sampler.seed=3",
)


@dataclass
class Cluster(Clock):
    """A clock during whose sleep jobs run: each ends at the next, after what `during` does to it.

    Attributes:
        most: the most jobs that were live at a time.
        ends: how the jobs of runs end that do not finish.
        during: called before jobs end, for what happens meanwhile.
    """

    launch: FakeLaunch
    output: Path
    most: int = 0
    ends: dict[str, str] = field(default_factory=dict)
    during: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        del seconds
        live = [job for job in self.launch.scheduler.jobs.values() if job.live]
        self.most = max(self.most, len(live))
        self.during()
        for job in live:
            if self.launch.scheduler.jobs[job.id].live:
                self.finish(job.name)

    def finish(self, name: str) -> None:
        """The run trains to its end: the closer its learning rate to 1e-3, the better."""
        run = RunPaths(self.output / "lr" / name)
        end = self.ends.pop(name, "COMPLETED")
        if end == "COMPLETED":
            config = read_frozen_config(run)
            assert config is not None
            with MetricSinks(run.metrics, "1-0") as sinks:
                sinks.log("eval", "rl", 1, {"eval/accuracy": 1 - abs(math.log10(config.optim.lr) + 3) / 4})
        self.launch.end(self.output, name, end)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr("pipeline.observability.report_page.write_report", lambda history: history.name)
    return Cluster(FakeLaunch(), tmp_path)


@pytest.fixture(autouse=True)
def quiet_optuna() -> Iterator[None]:
    """Its handler keeps the stream of the first test that logs."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.disable_default_handler()
    yield
    optuna.logging.enable_default_handler()


def command(cluster: Cluster, *overrides: str) -> list[str]:
    given = overrides or (*OPTUNA, AXIS)
    return ["experiment=demo", "name=lr", f"output={cluster.output}", "cluster=slurm", *given]


def drive(cluster: Cluster, *overrides: str) -> int:
    return run_sweeper(command(cluster, *overrides), cluster.launch.launch, clock=cluster)


def points(cluster: Cluster) -> list[sweep_manifest.Trial]:
    found = sweep_manifest.load_manifest(SweepPaths(cluster.output / "lr"))
    return list(found.points) if found else []


def accuracy(point: sweep_manifest.Trial) -> float:
    return 1 - abs(math.log10(float(point.overrides[0].partition("=")[2])) + 3) / 4


def test_optuna_chooses_points_two_at_a_time_and_the_best_is_printed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drive(cluster) == 0
    kept = points(cluster)
    assert [point.name for point in kept] == cluster.launch.submitted
    assert (len(kept), cluster.most) == (4, 2)
    best = max(kept, key=accuracy)
    told = capsys.readouterr().out
    assert re.search(rf"^  {accuracy(best):<10.4g}  {re.escape(str(best))}  best$", told, re.MULTILINE)
    results = yaml.safe_load((cluster.output / "lr" / "optimization_results.yaml").read_text())
    assert results["best_value"] == pytest.approx(accuracy(best))
    assert f"optim.lr={results['best_params']['optim.lr']}" == best.overrides[0]


def test_what_was_worse_is_best_where_less_is_better(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(cluster, *OPTUNA, "hydra.sweeper.direction=minimize", AXIS) == 0
    assert f"{min(points(cluster), key=accuracy)}  best" in capsys.readouterr().out


def test_the_same_command_again_completes_the_study_and_starts_nothing_twice(cluster: Cluster) -> None:
    assert drive(cluster) == 0
    first = list(cluster.launch.submitted)
    assert drive(cluster) == 0
    assert cluster.launch.submitted == first
    assert drive(cluster, *OPTUNA, "hydra.sweeper.n_trials=5", AXIS) == 0
    assert cluster.launch.submitted[:4] == first
    assert len(set(cluster.launch.submitted)) == 5


def test_a_point_that_failed_ends_the_study_with_its_reason_and_is_taken_up_again(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_one() -> None:
        if not cluster.ends and cluster.launch.submitted[2:]:
            cluster.ends[cluster.launch.submitted[2]] = "FAILED"
            cluster.during = lambda: None

    cluster.during = break_one
    with pytest.raises(SweepError, match=r"^point 2 \(optim\.lr=[\d.e-]+\): interrupted$"):
        drive(cluster)
    broken = cluster.launch.submitted[2]
    assert len(cluster.launch.submitted) == 4
    assert drive(cluster) == 0
    assert cluster.launch.submitted[4] == broken
    assert (len(cluster.launch.submitted), len(set(cluster.launch.submitted))) == (5, 4)


def test_a_sweeper_that_bears_failures_goes_on(cluster: Cluster) -> None:
    cluster.during = lambda: cluster.ends.setdefault(cluster.launch.submitted[0], "FAILED")  # type: ignore[assignment]
    assert drive(cluster, *OPTUNA, "hydra.sweeper.max_failure_rate=1", AXIS) == 0
    assert len(cluster.launch.submitted) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_what_was_started_and_the_same_command_resumes_it(
    cluster: Cluster, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        if len(cluster.launch.submitted) == 4:
            signal.raise_signal(number)

    cluster.during = interrupt
    # What is live when the signal comes goes on until it is cancelled.
    ends = cluster.finish
    cluster.finish = lambda name: None if len(cluster.launch.submitted) == 4 else ends(name)  # type: ignore[method-assign]
    assert drive(cluster) == code
    assert cluster.launch.scheduler.cancelled == ["3", "4"]
    assert "interrupted; the same command resumes" in capsys.readouterr().err
    assert not file_locks.is_held(SweepPaths(cluster.output / "lr").lock)

    cluster.during, cluster.finish = lambda: None, ends  # type: ignore[method-assign]
    assert drive(cluster) == 0
    assert cluster.launch.submitted[4:6] == cluster.launch.submitted[2:4]
    assert len(points(cluster)) == 4


def test_a_signal_between_two_submissions_starts_no_more_and_cancels_what_there_is(cluster: Cluster) -> None:
    launch = cluster.launch.launch

    def submit_and_signal(config: RunConfig, plan: Plan) -> str:
        signal.raise_signal(signal.SIGINT)
        return cluster.launch.submit(config, plan)

    assert run_sweeper(command(cluster), replace(launch, submit=submit_and_signal), clock=cluster) == 130
    assert (len(cluster.launch.submitted), cluster.launch.scheduler.cancelled) == (1, ["1"])


def test_a_command_that_was_killed_leaves_jobs_that_the_next_one_waits_for(cluster: Cluster) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        if len(cluster.launch.submitted) == 4:
            raise Killed

    cluster.during = kill
    with pytest.raises(Killed):
        drive(cluster)
    cluster.during = lambda: None
    assert drive(cluster) == 0
    assert (len(cluster.launch.submitted), len(set(cluster.launch.submitted))) == (4, 4)
    assert len(points(cluster)) == 4


def test_a_job_that_was_found_live_and_ends_early_is_started_again(cluster: Cluster) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    cluster.during = kill
    with pytest.raises(Killed):
        drive(cluster)
    cluster.during, cluster.ends = lambda: None, {cluster.launch.submitted[1]: "CANCELLED"}
    assert drive(cluster) == 0
    assert cluster.launch.submitted[2] == cluster.launch.submitted[1]
    assert len(points(cluster)) == 4


def test_what_the_scheduler_refuses_fails_the_trial_and_is_asked_for_again(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ("hydra/sweeper=basic", "optim.lr=1e-3,1e-4")
    cluster.launch.refused = {"0-lr_0.001"}
    with pytest.raises(Exception, match="job submit limit reached"):
        drive(cluster, *fixed)
    assert cluster.launch.submitted == []
    assert [point.refused for point in points(cluster)] == ["sbatch: job submit limit reached"] * 2
    cluster.launch.refused.clear()
    assert drive(cluster, *fixed) == 0
    assert cluster.launch.submitted == ["0-lr_0.001", "1-lr_0.0001"]
    assert "0.75" in capsys.readouterr().out


def test_hydras_own_sweeper_drives_runs_too(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(cluster, "hydra/sweeper=basic", "optim.lr=1e-4,1e-3", "loss=grpo,gspo") == 0
    assert sorted(point.overrides for point in points(cluster)) == [
        (f"optim.lr={lr}", f"loss={loss}") for lr in ("0.0001", "0.001") for loss in ("grpo", "gspo")
    ]
    assert "best" not in capsys.readouterr().out


def test_two_commands_do_not_drive_one_sweep(cluster: Cluster) -> None:
    def again() -> None:
        with pytest.raises(RunStateError, match="expected a sweep that no other process is submitting"):
            run_sweeper(command(cluster), cluster.launch.launch)

    cluster.during = again
    assert drive(cluster) == 0


def test_a_study_keeps_the_values_that_all_its_points_share(cluster: Cluster) -> None:
    drive(cluster)
    with pytest.raises(RunStateError, match="expected the values of its existing points, but seed: 0 → 7"):
        drive(cluster, *OPTUNA, AXIS, "seed=7")


def test_a_study_on_a_dataset_beside_the_command_goes_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cluster.output)
    (cluster.output / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    task = ("task=dataset", "task.options.path=rows.jsonl")
    drive(cluster, *OPTUNA, AXIS, *task)
    first = list(cluster.launch.submitted)
    assert drive(cluster, *OPTUNA, AXIS, *task) == 0
    assert cluster.launch.submitted == first


def test_a_study_keeps_its_direction(cluster: Cluster) -> None:
    drive(cluster)
    with pytest.raises(ConfigError, match=r"direction='minimize': expected maximize"):
        drive(cluster, *OPTUNA, "hydra.sweeper.direction=minimize", AXIS)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("hydra/sweeper=nevergrad", AXIS), "hydra/sweeper='nevergrad': expected an installed sweeper"),
        (("hydra/sweeper=optuna", AXIS), "add hydra.sweeper.direction=maximize, or minimize"),
        ((*OPTUNA, "hydra.launcher.nodes=3", AXIS), "hydra.launcher.nodes=3: expected one of objective, window, job"),
        ((*OPTUNA, "hydra.launcher.window=0", AXIS), "hydra.launcher.window=0: expected how many"),
        ((*OPTUNA, "hydra.launcher.objective=[loss,x]", AXIS), "expected 2 directions, one for each of loss, x"),
        ((*OPTUNA, "hydra/launcher=submitit_slurm", AXIS), "expected rollcall, which starts runs; leave it out"),
        ((*OPTUNA, "+hydra.sweeper.params.seed=1", AXIS), "sweep over the keys themselves"),
        ((*OPTUNA, "hydra.sweep.dir=/tmp", AXIS), "name=… and output=… set the sweep's directory"),
        ((*OPTUNA[:4], "hydra/sweeper/sampler=grid", AXIS), "plain -m runs every combination"),
        ((*OPTUNA, "hydra.sweeper.trials=3", AXIS), "Could not override 'hydra.sweeper.trials'"),
        ((*OPTUNA, "hydra.sweeper.storage=nosql://x", AXIS), "hydra.sweeper.storage='nosql://x': expected a database"),
        (
            (*OPTUNA, "optim.lr=interval(-1,1)"),
            "point optim.lr=-1.0: optim.lr=-1.0: expected greater than or equal to 0",
        ),
        ((*OPTUNA, "optim.lrr=interval(1,2)"), "expected a known key; did you mean optim.lr?"),
        ((*OPTUNA, "name=a,b"), "each point of a sweep gets its own directory"),
        ((*OPTUNA, AXIS, "loss=grpo,gpo"), "point optim.lr=1e-05 loss=gpo: loss='gpo': expected one of"),
        (
            (*OPTUNA, AXIS, "training.steps=0", "training.sft.steps=2"),
            "hydra.launcher.job='rl': expected sft, the only training job of the run (training.steps=0); set it to sft",
        ),
        (
            (*OPTUNA, "hydra.launcher.job=sft", "training.sft.steps=0", AXIS),
            "hydra.launcher.job='sft': expected rl",
        ),
        (("hydra.sweeper.n_trials=3", AXIS), "add hydra/sweeper=optuna, or leave them out"),
    ],
)
def test_a_wrong_command_is_one_line_and_starts_nothing(
    cluster: Cluster, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        drive(cluster, *overrides)
    assert said in str(caught.value)
    assert cluster.launch.submitted == []
    assert points(cluster) == []


def test_a_sweeper_that_an_extra_installs_is_named_with_its_command() -> None:
    settings = read_sweeper_command(["hydra/sweeper=optuna"])
    with pytest.raises(
        ConfigError, match=r"expected an installed sweeper \(basic\); .*-m pip install 'hydra-optuna-sweeper.*"
    ):
        refuse_missing(settings, ["basic"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra/sweeper=optuna"], "expected -m: only a sweeper reads Hydra's own keys; add -m"),
        (
            ["-m", "--detach", "hydra/sweeper=optuna"],
            "expected a command without a sweeper; the sweeper chooses points in this process",
        ),
    ],
)
def test_the_launcher_refuses_what_no_sweeper_can(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_run.main(["experiment=demo", "cluster=slurm", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_shows_a_plan_and_leaves_nothing(cluster: Cluster) -> None:
    assert run_sweeper(command(cluster), cluster.launch.launch, dry_run=True) == 0
    assert cluster.launch.shown == [("point", True)]
    assert list(cluster.output.iterdir()) == []
