"""The Multi-Process Service of a node: started before its roles, gone after them."""

import os
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.errors import RollcallError
from slurm.agent import multi_process_service as service
from slurm.agent.multi_process_service import LOGS, PIPES, multi_process_service, share_gpus
from slurm.agent.preflight import MPS_PROGRAM, Gpu, NodeRequirements, preflight
from tests.patience import WAIT_SECONDS

STAND_IN = Path(__file__).parents[2] / "fakes" / "mps_control.py"


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in on PATH."""
    tool = tmp_path / "driver" / MPS_PROGRAM
    tool.parent.mkdir()
    shutil.copy(STAND_IN, tool)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tool


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


def test_the_service_answers_inside_the_block_and_is_gone_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    before = children()
    with multi_process_service(True, "demo-0", tmp_path / "mps.log") as variables:
        folder = Path(variables[PIPES])
        assert variables == {PIPES: str(folder), LOGS: str(folder)}
        assert (folder / "control").exists()
        assert (folder / "visible").read_text() == "all"
        assert len(children()) == len(before) + 2
    assert children() == before
    assert not folder.exists()


def test_a_node_whose_roles_share_no_gpu_starts_nothing(tmp_path):
    before = children()
    with multi_process_service(False, "demo-0", tmp_path / "mps.log") as variables:
        assert variables == {}
        assert children() == before


def test_a_daemon_that_ended_during_the_block_is_reported(tmp_path, capsys):
    before = children()
    with multi_process_service(True, "demo-0", tmp_path / "mps.log") as variables:
        (Path(variables[PIPES]) / "control").unlink()
        until = time.monotonic() + WAIT_SECONDS
        while children() != before and time.monotonic() < until:
            time.sleep(0.05)
    assert f"{MPS_PROGRAM} exited with code 0 before its roles; {tmp_path / 'mps.log'}" in capsys.readouterr().out


def test_roles_share_a_gpu_if_two_of_them_have_it():
    assert share_gpus([(0,), (0,)])
    assert share_gpus([(0, 1), (), (1, 2)])
    assert not share_gpus([(0,), (1,), ()])


def test_the_service_ends_when_the_block_raises(tmp_path):
    before = children()
    with pytest.raises(KeyError), multi_process_service(True, "demo-0", tmp_path / "mps.log") as variables:
        raise KeyError
    assert children() == before
    assert not Path(variables[PIPES]).exists()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MPS_FAILS", f"{MPS_PROGRAM} exited with code 1: no device; set resources.mps=false"),
        ("MPS_HANGS", f"{MPS_PROGRAM} to answer"),
    ],
)
def test_a_service_that_does_not_start_is_one_error_and_leaves_nothing(variable, text, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, "no device")
    monkeypatch.setattr(service, "START_SECONDS", 1.0)
    monkeypatch.setattr(service, "STOP_SECONDS", 0.2)
    before = children()
    with pytest.raises(RollcallError, match=text), multi_process_service(True, "demo-0", tmp_path / "mps.log"):
        pytest.fail("the block was entered")
    assert children() == before


def test_a_gpu_node_without_the_program_is_unfit_only_if_its_roles_need_it(program, tmp_path):
    needs, one = NodeRequirements(disk=1, memory=1, free_gpus=True, mps=True), [Gpu(index=0)]
    assert preflight(tmp_path, one, needs) == ()
    program.unlink()
    (problem,) = preflight(tmp_path, one, needs)
    assert problem == f"{MPS_PROGRAM} of NVIDIA's driver is not on PATH: add its folder, or set resources.mps=false"
    assert preflight(tmp_path, [], needs) == ()
    assert preflight(tmp_path, one, NodeRequirements(disk=1, memory=1)) == ()
