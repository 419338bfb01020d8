"""The kinds of sandbox: their command lines, and what is refused before the start, with which words."""

import shutil
import stat
from pathlib import Path

import pytest

from pipeline.config import TaskConfig
from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import Task, check_sandbox, load_task, sandbox, sandbox_kinds
from pipeline.environments.sandbox_guard import Bounds, parse_bounds
from pipeline.environments.sandbox_kinds import KINDS, SandboxSpec
from pipeline.errors import ConfigError

BOUNDS = Bounds(65, 7, 1 << 28, 64, 1 << 24, 64)
SPEC = SandboxSpec("/tmp/sandbox-a/files", BOUNDS, 1 << 26, ("/app",), "/tmp/sandbox-a/lease")


def refusal(**chosen: str) -> str:
    config = TaskConfig(name="tools", options={"tools": ["python"]}, sandbox=SandboxConfig(**chosen))
    with pytest.raises(ConfigError) as caught:
        check_sandbox(load_task(config, 0), config)
    return str(caught.value)


def test_a_task_that_runs_no_code_needs_no_sandbox() -> None:
    config = TaskConfig(name="arithmetic", sandbox=SandboxConfig(kind="podman"))
    check_sandbox(load_task(config, 0), config)


@pytest.mark.parametrize("kind", ["podman", "apptainer"])
def test_a_container_needs_an_image(kind: str) -> None:
    words = refusal(kind=kind)
    assert words.startswith(f"task.sandbox.image='': expected an image for task.sandbox.kind={kind}; install {kind}")
    assert "python3 3.9 or later" in words


def test_namespaces_take_no_image() -> None:
    words = refusal(kind="namespaces", image="/images/python")
    assert words.startswith("task.sandbox.image='/images/python': expected nothing with task.sandbox.kind=namespaces")


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_node_without_the_program_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.missing_sandbox.cache_clear()
    image = str(tmp_path) if KINDS[kind].needs_image else ""
    words = refusal(kind=kind, image=image)
    sandbox.missing_sandbox.cache_clear()
    assert f"there is no command {KINDS[kind].program}" in words
    assert KINDS[kind].hint in words
    assert "or set task.sandbox.kind=none" in words


def test_a_task_that_needs_a_sandbox_is_not_advised_to_run_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "needs_sandbox", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.missing_sandbox.cache_clear()
    words = refusal(kind="namespaces")
    sandbox.missing_sandbox.cache_clear()
    assert words.endswith(KINDS["namespaces"].hint)


@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap here")
def test_an_image_without_python_is_refused(tmp_path: Path) -> None:
    assert "python3: No such file or directory" in refusal(kind="bubblewrap", image=str(tmp_path))


@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap here")
def test_an_image_may_be_named_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image" / "etc").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "python3: No such file or directory" in refusal(kind="bubblewrap", image="image")


@pytest.mark.skipif(not shutil.which("podman"), reason="no podman here")
def test_an_image_that_is_not_on_the_node_is_refused() -> None:
    assert "image not known" in refusal(kind="podman", image="localhost/rollcall-has-no-such-image:1")


def test_podman_has_no_network_no_registry_and_no_cgroup() -> None:
    command = KINDS["podman"].command(SPEC, "docker.io/library/python:3.12-slim")
    line = " ".join(command)
    for words in (
        "podman run --rm --interactive --name rollcall-sandbox-a --pull never --network none",
        "--read-only --read-only-tmpfs=false --cgroups disabled --cap-drop all",
        "--security-opt no-new-privileges",
        "--env-host=false --http-proxy=false",
        "--tmpfs /tmp:rw,nosuid,nodev,exec,size=67108864,mode=1777 --tmpfs /app:rw",
        "--volume /tmp/sandbox-a/files:/run/sandbox/files:ro --volume /tmp/sandbox-a/lease:/run/sandbox/lease:ro",
        "--entrypoint python3 docker.io/library/python:3.12-slim -I -S /run/sandbox/guard.py /run/sandbox/files /tmp",
    ):
        assert words in line
    assert "--rootfs" not in line
    assert parse_bounds(command[-1]) == BOUNDS


def test_podman_runs_an_unpacked_directory_too(tmp_path: Path) -> None:
    line = " ".join(KINDS["podman"].command(SPEC, str(tmp_path)))
    assert f"--entrypoint python3 --rootfs {tmp_path} -I -S /run/sandbox/guard.py" in line


def test_apptainer_shows_nothing_of_the_machine() -> None:
    command = KINDS["apptainer"].command(SPEC, "/images/python.sif")
    line = " ".join(command)
    assert line.startswith("apptainer --silent exec --userns --containall --cleanenv --no-home --no-init --net")
    assert "--network none --no-privs" in line
    assert "--scratch /app" in line
    assert "--bind /tmp/sandbox-a/lease:/run/sandbox/lease:ro /images/python.sif python3 -I -S" in line
    assert parse_bounds(command[-1]) == BOUNDS


def test_options_of_the_users_own_containers_do_not_reach_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APPTAINER_BIND", "SINGULARITY_BINDPATH", "APPTAINERENV_SECRET", "APPTAINER_CACHEDIR"):
        monkeypatch.setenv(name, "/scratch")
    environment = sandbox._environment(SandboxConfig(kind="apptainer", image="/images/python.sif"), "/tmp/sandbox-a")
    assert [name for name in environment if name.startswith(("APPTAINER", "SINGULARITY"))] == ["APPTAINER_CACHEDIR"]
    assert "PATH" in environment


def test_the_code_cannot_write_to_the_lease(tmp_path: Path) -> None:
    """Otherwise it could keep its sandbox when the worker is gone."""
    with sandbox._lease(str(tmp_path), is_needed=True) as lease:
        mode = Path(lease).stat().st_mode
        assert stat.S_ISFIFO(mode)
        assert stat.S_IMODE(mode) == 0o400


def test_every_kind_of_the_schema_has_a_command() -> None:
    kinds = SandboxConfig.model_fields["kind"].annotation
    assert {*sandbox_kinds.KINDS, "none"} == set(getattr(kinds, "__args__", ()))
