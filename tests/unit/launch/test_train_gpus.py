"""GPUs of jobs that stand alone."""

from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.errors import PlanError
from slurm.launch.train import QueuedTrainer, Trainer
from tests.fakes.configs import make_config
from tests.fakes.gpus import give_gpus


def config(device: str = "cuda", processes: int = 2) -> RunConfig:
    gpus = 1 if device == "cuda" else 0
    return make_config(resources={"device": device, "trainer": {"processes": processes, "gpus": gpus}})


def test_jobs_on_this_machine_claim_a_gpu_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 0, 0)
    with Trainer(tmp_path, config())._gpus() as first, Trainer(tmp_path, config(processes=1))._gpus() as second:
        assert (first, second) == ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2"})
        with pytest.raises(PlanError, match=r"1 GPU needed, 0 of 3 free \(GPU 0 is claimed by run test "):
            Trainer(tmp_path, config(processes=1))._gpus().__enter__()
    with Trainer(tmp_path, config(processes=3))._gpus() as all_free:
        assert all_free == {"CUDA_VISIBLE_DEVICES": "0,1,2"}


def test_jobs_without_gpus_and_those_of_slurm_claim_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = give_gpus(monkeypatch, tmp_path, 0, 0)
    for trainer in (Trainer(tmp_path, config("cpu")), QueuedTrainer(tmp_path, config())):
        with trainer._gpus() as variables:
            assert variables == {}
    assert not folder.exists()
