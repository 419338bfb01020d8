"""FP8 on GPUs without it: refused by their compute capability, before vLLM starts."""

from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.inference.vllm.gpu_capability import capabilities, check_capability
from pipeline.roles.inference import launch
from pipeline.roles.role_context import RoleContext
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Placement, World
from tests.fakes.configs import make_config
from tests.fakes.gpus import give_capabilities


def fp8_run(**inference: str) -> RunConfig:
    gpus = {"device": "cuda", "inference": {"gpus": 1}, "trainer": {"gpus": 1}}
    return make_config(
        resources=gpus, inference={"quantization": "fp8"} | inference, model={"path": "tiny", "dtype": "bfloat16"}
    )


@pytest.mark.parametrize(("capability", "fits"), [("8.0", False), ("8.6", False), ("8.9", True), ("12.0", True)])
def test_fp8_needs_8_9(capability: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_capabilities(monkeypatch, tmp_path, "9.0", capability)
    check_capability(fp8_run(), [0])
    check_capability(fp8_run(quantization="none"), [0, 1])
    if fits:
        check_capability(fp8_run(), [0, 1])
        return
    with pytest.raises(ConfigError) as refused:
        check_capability(fp8_run(), [0, 1])
    assert str(refused.value) == (
        f"inference.quantization='fp8': expected none on GPU 1, whose compute capability is {capability}; "
        "FP8 needs 8.9 or newer; leave it out"
    )


@pytest.mark.parametrize("output", ["exit 9", "echo No devices were found", "echo '0, [N/A]'"])
def test_unknown_gpus_are_left_to_vllm(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert capabilities() == {}
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{output}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert capabilities() == {}
    check_capability(fp8_run(), [0])


def test_a_server_does_not_start_on_a_gpu_without_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_capabilities(monkeypatch, tmp_path, "8.0", "9.0")
    place = Placement(role="inference", index=0, rank=0, address="127.0.0.4", ports=(4321,), gpus=(0,))
    world = World(run_id="r-1", attempt="1-0", epoch=0, leader=0, secret="00", placements=(place,))
    context = RoleContext(RunPaths(tmp_path / "run").attempt("r-1", "1-0"), fp8_run(), world, place)
    with pytest.raises(ConfigError, match=r"on GPU 0, whose compute capability is 8\.0"):
        launch(context)
