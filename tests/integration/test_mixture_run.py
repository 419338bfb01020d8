"""A whole run of a mixture of experts with adapters on its experts, which is killed, interrupted and resumed.

    python -m pytest -m trial tests/integration/test_mixture_run.py

Two trainer processes share the experts (`ep=2`), a real server gets the merged weights while it samples.
"""

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.train.service.random_base import write_base
from tests.bench.bench_replay import write_mixture
from tests.support.runs.launched import Launches

pytestmark = [pytest.mark.integration, pytest.mark.trial]
STEPS, SFT_STEPS = 6, 8
RUN = (
    f"training.steps={STEPS}",
    f"training.sft.steps={SFT_STEPS}",
    "training.checkpoint_every=1",
    "training.max_lag=0",
    "loss.old_logprobs=recompute",
    "model.lora.rank=8",
    "model.lora.merge=true",
    "resources.trainer.processes=2",
    "training.mesh.ep=2",
    "optim.lr=2e-3",
    "faults=[kill:trainer@step=2]",
)
SECONDS = 600


def test_adapters_on_experts_survive_a_killed_trainer_and_an_interruption(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_base(write_mixture(tmp_path / "shape"), base, seed=3)
    with Launches(tmp_path / "runs") as launches:
        keys = (f"model.path={base}", "model.init=pretrained", *RUN)
        interrupted = launches.submit("mixture", *keys)
        interrupted.wait_for_step(4, SECONDS)
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.process.wait(SECONDS) == 130
        assert max(row["step"] for row in interrupted.rows()) < STEPS
        assert interrupted.history().count(("trainer.0", "ready")) == 2, "the killed trainer was started in place"
        resumed = launches.submit("mixture", *keys)
        assert resumed.process.wait(SECONDS) == 0, resumed.output()

    rows = resumed.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Both compute in float32 with equal weights: an expert without its adapter, or an older one, would differ far more.
    assert max(row["mismatch_kl"] for row in rows) < 1e-7
    before, after = load_file(base / "model.safetensors"), load_file(resumed.run.model / "model.safetensors")
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == 4 * 16 * 3  # layers, experts, matrices
    assert all(not np.array_equal(before[name], after[name]) for name in experts)
