"""The containers of a batch file: the words of each runtime, and the mounts that a run gets by itself."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run.paths import AttachedPaths, RunPaths
from pipeline.topology.plan import make_plan
from slurm.scheduler.slurm.batch_file import batch_file
from slurm.scheduler.slurm.container_command import automatic_mounts, mounts_of
from tests.fakes.configs import make_config


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a home directory, who starts the launcher in `work`."""
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for image in ("rollcall.sif", "rollcall.sqsh"):
        (tmp_path / image).touch()
    return tmp_path


def config_of(kind: str, image: str, mounts: list[str], device: str = "cpu", **keys: Any) -> RunConfig:
    container = {"kind": kind, "image": image, "mounts": mounts, "python": "/opt/python"}
    sections = {"resources": {"device": device}, "cluster": {"scheduler": "slurm", "container": container}}
    return make_config(name="demo", **(sections | keys))


def text_of(config: RunConfig, home: Path) -> str:
    """The batch file, with `~` in place of the test's folder."""
    run = RunPaths(home / "runs" / "demo")
    folder = run.submitit / "slurm"
    command = f"/venv/bin/python -u -m submitit.core._submit {folder}"
    plan = make_plan(config)
    text = batch_file(config, plan, run, run_id="demo-1f3a", folder=folder, python="/venv/bin/python", command=command)
    return text.replace(str(home), "~")


SCRIPTS = "~/runs/demo/code/slurm/scheduler/slurm"
LOG = """sh -c 'exec "$@" >>"$0/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1' ~/runs/demo/submitit/slurm"""
AGENT = (
    f"/opt/python -I {SCRIPTS}/container_entry.py ~/runs/demo/code ~/work -u -m submitit.core._submit "
    "~/runs/demo/submitit/slurm"
)


def test_apptainer_is_a_prefix_of_the_agents_command(home: Path) -> None:
    text = text_of(config_of("apptainer", str(home / "rollcall.sif"), ["/usr:/host/usr:ro"], device="cuda"), home)
    assert (
        f"""
agent=({LOG}
  /venv/bin/python -I -S {SCRIPTS}/container_start.py --image=~/rollcall.sif --cache=~/home/.cache --
  apptainer exec --nv --no-home --pwd ~/work
  --bind /usr:/host/usr:ro
  --bind ~/work:~/work
  --bind ~/home/.cache:~/home/.cache
  --bind ~/runs/demo:~/runs/demo
  ~/rollcall.sif
  {AGENT})
"""
        in text
    )
    assert "NVIDIA_VISIBLE_DEVICES" not in text, "--nv mounts the driver"


def test_enroot_gets_mounts_in_the_syntax_of_fstab_and_the_driver_by_variables(home: Path) -> None:
    config = config_of("enroot", str(home / "rollcall.sqsh"), ["/usr:/host/usr:ro"], device="cuda")
    text = text_of(config, home)
    mounts = mounts_of(config, RunPaths(home / "runs" / "demo"))
    assert "/tmp" in {mount.source for mount in mounts}, "enroot mounts an empty one of its own"
    lines = "".join(
        f"\n  --mount {mount.source}:{mount.target}:none:x-create=auto,rbind{',ro' if mount.read_only else ''}"
        for mount in mounts
    ).replace(str(home), "~")
    assert "/usr:/host/usr:none:x-create=auto,rbind,ro" in lines
    assert (
        f"""
agent=({LOG}
  /venv/bin/python -I -S {SCRIPTS}/container_start.py --image=~/rollcall.sqsh --cache=~/home/.cache --
  enroot start{lines}
  ~/rollcall.sqsh
  {AGENT})
"""
        in text
    )
    assert 'export NVIDIA_VISIBLE_DEVICES="${NVIDIA_VISIBLE_DEVICES:-all}"' in text


def test_pyxis_gets_options_of_srun_for_each_component(home: Path) -> None:
    hetjob = {"resources": {"device": "cuda", "hetjob": True, "trainer": {"gpus": 1}, "inference": {"gpus": 1}}}
    config = config_of("pyxis", "nvcr.io#nvidia/pytorch:25.06-py3", ["/usr:/host/usr:ro"], **hetjob)
    text, caches = text_of(config, home), str(home / "home" / ".cache")
    mounts = mounts_of(config, RunPaths(home / "runs" / "demo"))
    flags = {"/usr": ":ro", caches: ":nofail"}
    ours = ",".join(f"{mount.source}:{mount.target}{flags.get(mount.source, '')}" for mount in mounts)
    assert f"\nagent=({LOG}\n  {AGENT})\n" in text
    (line,) = [line for line in text.splitlines() if "srun --het-group" in line]
    assert line.startswith("[ $code != 0 ] || srun --het-group=0 ")
    groups = [shlex.split(part) for part in line.removesuffix(" || code=$?").split(" : ")]
    options = [[word for word in group if "container" in word] for group in groups]
    assert (
        options[0]
        == options[1]
        == [
            "--container-image=nvcr.io#nvidia/pytorch:25.06-py3",
            f"--container-mounts={ours.replace(str(home), '~')}",
            "--container-workdir=~/work",
            "--no-container-mount-home",
            "--no-container-remap-root",
            "--container-env=NVIDIA_VISIBLE_DEVICES,NVIDIA_DRIVER_CAPABILITIES",
        ]
    )


@pytest.mark.parametrize(("option", "code"), [("--container-image", 0), ("--container", 127)])
def test_the_check_for_pyxis_is_right_with_any_options_of_the_shell(home: Path, option: str, code: int) -> None:
    srun = home / "srun"
    srun.write_text(f"#!/bin/sh\necho {option}=IMAGE\nseq 100000\n")  # more than a pipe holds
    srun.chmod(0o755)
    text = text_of(config_of("pyxis", "nvcr.io#nvidia/pytorch:25.06-py3", []), home)
    check = text[text.index("code=0\n") : text.index("\n[ $code != 0 ]")]
    script = f'set -euo pipefail\nPATH="{home}:$PATH"\n{check}\nexit $code'
    assert subprocess.run(["bash", "-c", script], stdout=subprocess.DEVNULL, check=False).returncode == code


def test_a_container_has_the_files_of_the_run_its_caches_and_what_keys_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "models" / "a").mkdir(parents=True)
    (home / "data").mkdir()
    (home / "data" / "train.jsonl").touch()
    monkeypatch.setenv("HF_HOME", str(home / "hub"))
    keys: dict[str, Any] = {
        "model": {"path": "../models/a", "init": "random"},
        "data": {"path": str(home / "data" / "train.jsonl")},
        "task": {
            "name": "arithmetic",
            "options": {"program": "/usr/bin/env", "absent": "/no/such/file", "word": "data"},
        },
    }
    config = config_of("apptainer", "docker://image", [], **keys)
    run = RunPaths(home / "runs" / "demo")
    names = {Path(mount.source).relative_to(home).as_posix() for mount in automatic_mounts(config, run)}
    assert names == {"work", "runs/demo", "home/.cache", "hub", "models/a", "data/train.jsonl"}
    assert all(mount.source == mount.target and not mount.read_only for mount in mounts_of(config, run))


def test_a_key_that_names_a_link_has_this_path_in_the_container_too(home: Path) -> None:
    (home / "real").mkdir()
    (home / "real" / "tool").touch()
    (home / "link").symlink_to(home / "real")
    tool = home / "link" / "tool"
    config = config_of("apptainer", "docker://image", [], task={"name": "arithmetic", "options": {"tool": str(tool)}})
    targets = {mount.target for mount in mounts_of(config, RunPaths(home / "runs" / "demo"))}
    assert {str(tool), str(tool.resolve())} <= targets


@pytest.mark.parametrize("link", ["huggingface", "huggingface/hub"])
def test_a_cache_that_is_a_link_to_another_disk_leads_somewhere_in_the_container(home: Path, link: str) -> None:
    (home / "disk").mkdir()
    path = home / "home" / ".cache" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(home / "disk")
    mounts = automatic_mounts(config_of("apptainer", "docker://image", []), RunPaths(home / "runs" / "demo"))
    assert {str(home / "disk"), str(home / "home" / ".cache")} <= {mount.target for mount in mounts}


def test_a_cache_whose_link_names_other_links_leads_somewhere_in_the_container(home: Path) -> None:
    """As ~/.cache/huggingface → /scratch/user/cache, where /scratch itself is a link on all nodes."""
    (home / "disk" / "user" / "hub").mkdir(parents=True)
    (home / "scratch").symlink_to(home / "disk")
    (home / "disk" / "user" / "cache").symlink_to("hub")
    path = home / "home" / ".cache" / "huggingface"
    path.parent.mkdir(parents=True)
    path.symlink_to(home / "scratch" / "user" / "cache")
    mounts = automatic_mounts(config_of("apptainer", "docker://image", []), RunPaths(home / "runs" / "demo"))
    names = {Path(mount.target).relative_to(home).as_posix() for mount in mounts}
    assert {"home/.cache", "scratch/user/cache", "scratch/user/hub", "disk/user/hub"} <= names


def test_an_attached_job_has_the_directory_of_the_run_that_it_serves(home: Path) -> None:
    run = AttachedPaths(home / "runs" / "demo" / "attached" / "1")
    config = config_of("apptainer", "docker://image", [])
    assert str(home / "runs" / "demo") in {mount.source for mount in automatic_mounts(config, run)}


def test_a_launcher_in_a_directory_of_the_system_does_not_mount_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = config_of("apptainer", "docker://image", []), RunPaths(home / "runs" / "demo")
    for directory in ("/", "/usr", "/etc"):
        monkeypatch.chdir(directory)
        assert directory not in {mount.source for mount in automatic_mounts(config, run)}
    assert "--pwd ~/runs/demo\n" in text_of(config, home)


def test_a_users_mount_replaces_ours_at_the_same_path(home: Path) -> None:
    (home / "other").mkdir()
    config = config_of("apptainer", "docker://image", [f"{home}/other:{home}/home/.cache"])
    mounts = {mount.target: mount.source for mount in mounts_of(config, RunPaths(home / "runs" / "demo"))}
    assert mounts[str(home / "home" / ".cache")] == str(home / "other")


@pytest.mark.parametrize(
    ("kind", "image", "mounts", "words"),
    [
        ("apptainer", "lost.sif", [], "cluster.container.image='lost.sif': expected an image that exists on this host"),
        ("pyxis", "./lost.sqsh", [], "such as nvcr.io#nvidia/pytorch:25.06-py3"),
        ("enroot", ".", [], "expected a squashfs file"),
        ("pyxis", "ubuntu", ["/no/such"], "cluster.container.mounts='/no/such': expected a source that exists on this"),
    ],
)
def test_what_this_host_lacks_is_refused_before_anything_is_queued(
    kind: str, image: str, mounts: list[str], words: str, home: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        text_of(config_of(kind, image, mounts), home)
    assert words in str(refused.value)


def test_a_run_directory_that_no_runtime_can_mount_is_refused(home: Path) -> None:
    run = RunPaths(home / "my runs" / "demo")
    with pytest.raises(ConfigError, match="expected a path without ' ', which separates mounts"):
        mounts_of(config_of("apptainer", "docker://image", []), run)
