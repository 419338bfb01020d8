"""The measurements on GPUs, which no test runs where there is none."""

import pkgutil
from importlib import import_module

import pytest

from slurm.submission.compose_config import compose_config
from tests import gpu
from tests.gpu import cold_starts, real


@pytest.mark.parametrize("name", sorted(each.name for each in pkgutil.iter_modules(gpu.__path__)))
def test_a_measurement_can_be_imported_without_a_gpu(name: str) -> None:
    import_module(f"tests.gpu.{name}")


def test_a_start_of_the_real_model_is_measured_from_its_command_and_from_its_first_step() -> None:
    config = compose_config(["experiment=smollm2", "model.path=unread"])
    rewards = [0.1] * 10 + [0.4] * 10
    ran = {"exit": 0, "ends": [50.0 + 2 * step for step in range(20)], "rewards": rewards}
    found = real.summary("ours", ran, config)
    assert found["from_command"] == {"first step": 50.0, "reward 0.15": 70.0, "reward 0.30": 76.0}
    assert found["from_first_step"] == {"reward 0.15": 20.0, "reward 0.30": 26.0}
    assert found["samples_per_second"] == 128
    assert real.summary("ours", {"exit": 1, "ends": [], "rewards": []}, config)["exit"] == 1
    theirs = real.summary("theirs", ran | {"ends": [100.0 + 4 * step for step in range(20)]}, config)
    starts = [{"side": side, "start": "warm"} | each for side, each in (("ours", found), ("theirs", theirs))]
    ratios = real.ratios(starts)
    assert ratios["warm, from_command"] == {"first step": 0.5, "reward 0.15": 0.5, "reward 0.30": 76 / 152}
    assert ratios["warm, samples_per_second"] == 2


def test_the_starts_of_a_call_share_its_time_and_leave_room_for_their_ends() -> None:
    weights, left, spent = [5, 6, 4, 5], 570.0, 0.0
    for number in range(len(weights)):
        spent += cold_starts.seconds_of_first(left - spent, weights[number:]) + cold_starts.END_SECONDS
    assert spent == pytest.approx(left)
