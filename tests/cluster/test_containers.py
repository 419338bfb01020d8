"""Jobs of a real Slurm whose agents run in containers: mounts, signals, requeue, and what is said where one is missing.

The runtimes are stand-ins with real mount namespaces (`container_runtime`). The trial is a whole run with all roles.
"""

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.first_failure import FirstFailure
from pipeline.utils import shared_files
from tests.cluster import container_runtime
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun, launch
from tests.cluster.test_requeue import Life, start
from tests.support.runs.launched import STEPS, TWO_RANKS

pytestmark = [pytest.mark.cluster]

HOST = ("/usr", "/bin", "/lib", "/lib64", "/etc", sys.base_prefix)
"""The image of these tests is empty: what its Python needs is mounted from the host, at the same path."""
SECRET = 'of "two" kinds: $HOME and #'


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return container_runtime.install(tmp_path_factory.mktemp("runtime") / "bin")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An image for each stand-in, with one file that no host has."""
    folder = tmp_path_factory.mktemp("images")
    image = folder / "image"
    image.mkdir()
    (image / "of_the_image").write_text("yes")
    (image / "mnt").mkdir()
    with tarfile.open(folder / "image.tar", "w") as tar:
        tar.add(image, ".")
    return {"apptainer": image, "enroot": folder / "image.tar"}


def container(kind: str, image: Path, **keys: Any) -> dict[str, Any]:
    return {"kind": kind, "image": str(image), "python": sys.executable, "mounts": list(HOST)} | keys


def begin(slurm: SlurmCluster, path: str, root: Path, name: str, *script: str, **cluster: Any) -> Life:
    """Submit with this PATH, which the job inherits."""
    before = slurm.env
    slurm.env = before | {"PATH": path, "WANDB_API_KEY": SECRET}
    try:
        return start(slurm, root, name, *script, **cluster)
    finally:
        slurm.env = before


@pytest.fixture(scope="module")
def jobs(
    cluster: SlurmCluster, runtimes: Path, images: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Life]]:
    """Jobs that run side by side, each disturbed once."""
    root, plain = tmp_path_factory.mktemp("jobs"), cluster.env["PATH"]
    path = f"{runtimes}:{plain}"
    broken = root / "broken.tar"
    broken.write_text("no image")
    bare = container("apptainer", images["apptainer"], python="/usr/bin/python3")
    found = {
        "apptainer": begin(
            cluster, path, root, "apptainer", "look", "finish", container=container("apptainer", images["apptainer"])
        ),
        "enroot": begin(
            cluster, path, root, "enroot", "look", "finish", container=container("enroot", images["enroot"])
        ),
        "absent": begin(cluster, plain, root, "absent", "wait", container=container("enroot", images["enroot"])),
        "broken": begin(cluster, path, root, "broken", "wait", container=container("enroot", broken)),
        "bare": begin(cluster, path, root, "bare", "wait", container=bare),
        "pyxis": begin(cluster, path, root, "pyxis", "wait", container=container("pyxis", Path("registry#image"))),
    }
    found["apptainer"].wait_for_ranks()
    cluster.run("scancel", "--signal=USR2", found["apptainer"].job)
    found["enroot"].wait_for_ranks()
    cluster.run("scontrol", "requeue", found["enroot"].job)
    yield found
    for life in found.values():
        cluster.run("scancel", "--quiet", life.job)


@pytest.mark.parametrize("kind", ["apptainer", "enroot"])
def test_a_signal_reaches_the_agents_in_their_containers_and_the_next_attempt_has_containers_too(
    kind: str, jobs: dict[str, Life]
) -> None:
    life = jobs[kind]
    assert life.end("COMPLETED")["Restarts"] == "1"
    notice = kind == "apptainer"
    assert life.decisions == ["requeued" if notice else "left", "finished"]
    if notice:
        assert "stop requested (SIGUSR2, agent." in life.outcome(0).reason


@pytest.mark.parametrize("kind", ["apptainer", "enroot"])
def test_an_agent_sees_its_image_the_files_of_the_run_and_nothing_else_of_the_host(
    kind: str, jobs: dict[str, Life]
) -> None:
    first, second = (json.loads((jobs[kind].run.root / f"seen.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    seen = first
    assert seen["image"] == "yes"
    assert seen["hidden"] == [], "not mounted"
    assert seen["WANDB_API_KEY"] == SECRET
    assert seen["PYTHONPATH"].split(":")[0] == str(jobs[kind].run.paths.code)
    assert seen["PYTHONNOUSERSITE"] == "1"
    assert seen["cwd"] == str(Path.cwd())
    assert seen["blocked"] == [], "the agent handles its signals"


def test_enroot_removes_the_container_of_every_rank_and_attempt(jobs: dict[str, Life], runtimes: Path) -> None:
    jobs["enroot"].end("COMPLETED")
    calls = [call for call in container_runtime.calls(runtimes) if call[0] == "enroot"]
    names = {f"rollcall-{jobs['enroot'].job}-{rank}" for rank in (0, 1)}
    created = [call[call.index("--name") + 1] for call in calls if call[1] == "create"]
    removed = [call[-1] for call in calls if call[1] == "remove"]
    assert {name for name in created if removed.count(name) == created.count(name) == 2} == names
    assert not any(SECRET in word for call in calls for word in call)
    assert list((runtimes / "containers").glob("*")) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "enroot is not on PATH; load it in cluster.setup"),
        ("broken", "enroot create failed: [ERROR] Invalid image format"),
        ("bare", "/usr/bin/python3 of the image has no cloudpickle, msgspec"),
        ("pyxis", "srun has no --container-image, so Slurm has no pyxis here"),
    ],
)
def test_a_container_that_does_not_start_ends_the_job_with_the_reason(
    name: str, reason: str, jobs: dict[str, Life]
) -> None:
    life = jobs[name]
    life.end("FAILED")
    assert life.decisions == ["stopped"], life.log()
    failure = shared_files.read_document(life.paths(0).first_failure, FirstFailure)
    assert failure is not None
    assert "its container did not start: " in failure.cause
    assert reason in failure.cause
    assert reason in life.outcome(0).reason


OVERRIDES = (f"cluster.container.python={sys.executable}", f"cluster.container.mounts=[{','.join(HOST)}]")


def test_a_dry_run_shows_the_command_and_a_lost_image_queues_nothing(
    cluster: SlurmCluster, images: dict[str, Path], tmp_path: Path
) -> None:
    kind = ("cluster.container.kind=apptainer", *OVERRIDES)
    shown = launch(cluster, tmp_path, "r", "--dry-run", *kind, f"cluster.container.image={images['apptainer']}")
    assert f"\n  {images['apptainer']}\n  {sys.executable} -I {tmp_path}/r/code/slurm/" in shown.stdout, shown.stderr
    assert f"\n  --bind {tmp_path}/r:{tmp_path}/r\n" in shown.stdout
    lost = launch(cluster, tmp_path, "r", "--detach", *kind, "cluster.container.image=/no/such.sif")
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1), lost.stderr
    assert "cluster.container.image='/no/such.sif': expected an image that exists on this host" in lost.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.trial
def test_a_whole_heterogeneous_run_in_containers_that_is_requeued_goes_on_to_its_end(
    cluster: SlurmCluster,
    runtimes: Path,
    images: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cluster.env, "PATH", f"{runtimes}:{cluster.env['PATH']}")
    shape = ("resources.hetjob=true", "resources.inference.nodes=1", TWO_RANKS)
    keys = ("cluster.container.kind=apptainer", f"cluster.container.image={images['apptainer']}", *OVERRIDES)
    run = SlurmRun.start(cluster, tmp_path, "r", *shape, *keys)
    run.wait_for_step(7)
    cluster.run("scancel", "--signal=USR2", run.job)
    fields = run.wait_for_end()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), run.output()
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    outcomes = [run.outcome(attempt) for attempt in (0, 1)]
    assert [outcome.decision for outcome in outcomes if outcome is not None] == ["requeued", "finished"]
