"""The dispatch layer over two real ranks; the scenarios are in `dispatch_ranks`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.dispatch_ranks import BREAKAGES, SCENARIOS
from tests.integration.training_cases import write_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dispatch") / "model"
    write_model(path, tied=True)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def outcomes(model: Path) -> dict[str, str | None]:
    """What became of each scenario, all in one world."""
    return run_ranks(model, model.parent / "outcomes.json")


def run_ranks(model: Path, results: Path, *breakage: str) -> dict[str, str | None]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.integration.dispatch_ranks", str(model), str(results), *breakage]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert results.exists(), done.stderr[-4000:]
    outcomes: dict[str, str | None] = json.loads(results.read_text())
    return outcomes


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[scenario] is None, outcomes[scenario]


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_breakage(breakage: str, model: Path, tmp_path: Path) -> None:
    (outcome,) = run_ranks(model, tmp_path / "outcome.json", breakage).values()
    assert outcome is None, outcome
