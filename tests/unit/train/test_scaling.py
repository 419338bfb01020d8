"""What `docs/decisions/0011` rests on, on a small batch: where a division may stand."""

import pytest
import torch

from tests.bench import bench_scaling
from tests.bench.bench_scaling import WAYS, Setting


@pytest.mark.parametrize(("ragged", "wrong"), [(True, {"mean, then ÷ M"}), (False, set())])
def test_only_the_mean_of_means_errs_and_only_on_ragged_micro_batches(
    ragged: bool, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scaling, "LONGEST", 32)
    found = bench_scaling.measure(0, Setting(ragged, torch.float32, torch.float32), rows=6, micro_batches=3)
    errors = {way.name: error for way, (error, _, _) in zip(WAYS, found, strict=True)}
    assert {name for name, error in errors.items() if error > 0.1} == wrong
    assert all(error < 1e-5 for name, error in errors.items() if name not in wrong)
