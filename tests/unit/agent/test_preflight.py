"""What a node finds out about itself."""

import errno
import ipaddress
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.utils.network_interfaces import candidate_addresses
from slurm.agent.preflight import (
    GIB,
    Gpu,
    NodeRequirements,
    find_gpus,
    free_memory,
    node_id,
    open_files_warning,
    preflight,
)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that knows two GPUs, the second in use."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aaa1, H200, 4, 1000'\necho '1, GPU-bbb2, H200, 500, 1000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("0,1", [0, 1]), ("1", [1]), ("GPU-bbb2", [1]), ("GPU-a", [0]), ("", []), ("7", [])],
)
def test_only_the_gpus_of_the_job_are_found(visible, indices):
    assert [gpu.index for gpu in find_gpus(visible)] == indices


@pytest.mark.parametrize(("visible", "indices"), [(None, []), ("0, 1", [0, 1]), ("GPU-aaa1", [])])
@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 9\n", "#!/bin/sh\necho 'No devices were found'\n"])
def test_without_a_working_tool_the_scheduler_is_believed(script, visible, indices, tmp_path, monkeypatch):
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [gpu.index for gpu in find_gpus(visible)] == indices


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_others_hold_is_a_problem_of_runs_that_use_gpus(tmp_path):
    gpus = find_gpus(None)
    assert preflight(tmp_path, gpus, NodeRequirements(disk=0)) == ()
    assert preflight(tmp_path, gpus, NodeRequirements(disk=0, free_gpus=True)) == (
        "another process holds 0.5 GiB of GPU 1",
    )


def test_a_fit_node_has_no_problems_and_keeps_no_probe(tmp_path):
    assert preflight(tmp_path, [Gpu(index=0)], NodeRequirements(disk=1, memory=1, free_gpus=True)) == ()
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_and_memory_are_named_with_both_numbers(tmp_path):
    disk, memory = preflight(tmp_path, (), NodeRequirements(disk=1 << 60, memory=1 << 50))
    assert disk.startswith(f"{tmp_path} has ")
    assert disk.endswith(f"GiB left, {(1 << 60) / GIB:.1f} are needed")
    assert memory.endswith("GiB of memory free, 1048576.0 are needed")


def test_too_low_a_limit_of_open_files_is_named_with_the_key_and_makes_no_node_unfit():
    assert open_files_warning(512, limit=2048) == ""
    assert open_files_warning(1 << 40, limit=-1) == ""
    assert open_files_warning(513, limit=2048) == (
        "a process may open 2048 files (ulimit -Hn), and 513 episodes of an agent in flight need about 2052: raise the "
        "limit, or lower rollout.concurrency"
    )


def test_a_folder_that_cannot_be_written_is_a_problem_not_an_exception(tmp_path):
    (tmp_path / "file").touch()
    assert preflight(tmp_path / "file", (), NodeRequirements()) == (
        f"cannot write in {tmp_path / 'file'}: File exists",
    )


def test_a_machine_knows_its_memory_its_boot_and_its_addresses():
    assert free_memory() > 1 << 20
    assert node_id() == node_id() != ""
    addresses = [ipaddress.ip_address(address) for address in candidate_addresses()]
    assert addresses
    assert len(addresses) == 1 or not any(address.is_loopback for address in addresses)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_disk_without_room_for_a_file_is_reported_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=8", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with suppress(OSError):
            for number in range(8):
                (folder / f"{number}").touch()
        began = time.monotonic()
        (problem,) = preflight(folder, (), NodeRequirements(disk=0, memory=0))
        assert time.monotonic() - began < 10
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert problem.startswith(f"cannot write in {folder}: No space left on device; df and df -i")


def test_an_exceeded_quota_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "replace", failing)
    began = time.monotonic()
    problems = preflight(tmp_path, (), NodeRequirements(disk=0, memory=0))
    assert time.monotonic() - began < 10
    assert problems == (f"cannot write in {tmp_path}: Disk quota exceeded",)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_disk_that_fails_for_a_moment_makes_no_node_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    replace, left = os.replace, iter(range(2))

    def failing(*paths: Any) -> None:
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        replace(*paths)

    monkeypatch.setattr(os, "replace", failing)
    assert preflight(tmp_path, (), NodeRequirements(disk=0, memory=0)) == ()
    assert list(tmp_path.iterdir()) == []
