"""The tour of the API with several versions of the SDK, beside a vLLM server that samples.

The installed one always; others where `TINKER_SDKS` names a folder of virtual environments, one for each version:

    for v in 0.25.0 0.30.0 0.34.0; do python -m venv sdks/$v && sdks/$v/bin/pip install tinker==$v; done
    TINKER_SDKS=sdks python -m pytest tests/integration/test_tinker_versions.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.integration.tinker_server import TinkerServer, serving_samples

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.filterwarnings("ignore")]
TOUR = Path(__file__).with_name("tinker_tour.py")
SECONDS = 600
OWN = ("listed", "rewards")
"""What differs between tours: versions take adapters away in two ways, and vLLM draws other samples each time."""


def environments() -> dict[str, Path]:
    """The Python of each environment, by its version."""
    root = Path(os.environ.get("TINKER_SDKS") or os.devnull)
    return {each.parts[-3]: each for each in sorted(root.glob("*/bin/python"))}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with serving_samples(tmp_path_factory.mktemp("versions"), ["127.0.0.11"], checkpoint_steps=5) as (started, _):
        yield started


def tour(server: TinkerServer, python: str | Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    done = subprocess.run([str(python), str(TOUR)], env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def installed(server: TinkerServer) -> dict[str, Any]:
    return tour(server, sys.executable)


def assert_rewards_rise(rewards: dict[str, list[float]]) -> None:
    assert set(rewards) == {"importance_sampling", "ppo"}
    for loss, earned in rewards.items():
        assert mean(earned[-3:]) > mean(earned[:3]) + 0.15, (loss, earned)


def test_the_tour_shows_what_the_api_promises(installed: dict[str, Any]) -> None:
    assert installed["models"][0] == "tiny"
    assert installed["rank"] == 4
    assert mean(installed["sft"][-3:]) < 0.5 * installed["sft"][0]
    assert_rewards_rise(installed["rewards"])
    assert installed["resumed"] == installed["next"]
    assert installed["loaded"] == installed["next"][0]
    assert installed["fresh"][0] == installed["next"][0], "the loss before the first step"
    assert installed["fresh"][1] != installed["next"][1], "moments that were not loaded show after it"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*installed["files"]}, "for peft and vLLM"
    assert installed["left"] == len(installed["listed"]) - 1
    assert "weights/half" in installed["listed"]
    assert installed["refused"]
    assert installed["after"]


@pytest.mark.parametrize("version", environments() or ["none"])
def test_another_version_of_the_sdk_sees_the_same_bits(
    server: TinkerServer, installed: dict[str, Any], version: str
) -> None:
    if version not in environments():
        pytest.skip("TINKER_SDKS names no folder of environments")
    seen = tour(server, environments()[version])
    assert_rewards_rise(seen["rewards"])
    same = {name: value for name, value in seen.items() if name not in OWN}
    assert same == {name: value for name, value in installed.items() if name not in OWN}
