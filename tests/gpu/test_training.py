"""The command that shows the training core on GPUs: all of it where there are some, and that it works at all here."""

import json
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu import training


@pytest.mark.gpu
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("ranks", [1, 2])
def test_everything_passes_on_gpus(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert training.main(["--ranks", str(ranks), "--out", str(tmp_path)]) == 0


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_everything_passes_on_two_cpu_processes(tmp_path: Path) -> None:
    arguments = ["--ranks", "2", "--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--seconds", "850"]
    assert training.main(arguments) == 0


@pytest.mark.trial  # what offload gives back is held on CPUs by tests/support/ranks/dispatch_residency.py
def test_offloaded_bytes_are_counted_and_come_back_on_a_cpu_too(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--parts", "memory"]
    assert training.main(arguments) == 0
    figures = json.loads((tmp_path / "memory.json").read_text())["figures"]
    sizes = {each["when"]: each["parts_of_rank_0"] for each in figures}
    assert min(sizes["policy after a step"]["policy"]) > 1 << 20
    assert sizes["all away, first time"]["policy"] == [0, 0]
    assert sizes["reference on the device, policy away"]["policy"] == [0, 0]
    assert sizes["policy after a further step, reference away"]["reference"] == [0, 0]


def test_a_part_that_fails_is_written_down_and_keeps_no_other_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(good: bool) -> tuple[object, object]:
        return lambda run: (good, {"trouble": "" if good else "it broke"}), lambda found: "a table"

    monkeypatch.setattr(training, "PARTS", {"first": part(False), "second": part(True)})
    assert training.main(["--out", str(tmp_path), "--parts", "first", "second"]) == 1
    assert json.loads((tmp_path / "first.json").read_text())["trouble"] == "it broke"
    assert json.loads((tmp_path / "second.json").read_text())["passed"]
    assert "first: FAILED" in capsys.readouterr().out


def test_a_part_that_does_not_end_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    run = training.Run(1, tmp_path, "cpu", "tiny", (), ends=time.monotonic() + 100)
    assert run.torchrun("endless", "tests.gpu.memory", str(tmp_path / "out"), "--device", "cpu", most=3) != ""
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in running if str(tmp_path / "out") in command]
