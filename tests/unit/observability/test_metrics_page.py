"""docs/metrics.md against the code: every number that is logged is there, and no other."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.algorithms.loss_metrics import means
from pipeline.run.paths import WORLD, RunPaths
from pipeline.topology.plan import Placement, World
from pipeline.train.loss_specs import SFT, ValueLoss
from pipeline.train.total_loss import total_value
from pipeline.utils.shared_dir import FileSharedDir
from tests.unit.train.losses_by_hand import NAMES, N, everything, measured, numbers, tokens, value_tokens

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "metrics.md"
ROLES = ROOT / "pipeline" / "roles"
LOGGED_BY = [
    *sorted((ROOT / "pipeline" / "train").rglob("*.py")),
    ROLES / "trainer_session.py",
    ROLES / "rl_services.py",
]
NAME = re.compile(r"[a-z_]+/[a-z_]+")


def documented() -> set[str]:
    return set(re.findall(r"^\| `([a-z_/]+)` \|", PAGE.read_text(), re.MULTILINE))


def keys_in(source: Path) -> set[str]:
    """The names with a slash that a module uses as keys, in a dict or in an assignment to one."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Dict):
            found += node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.append(node.slice)
    texts = {node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if NAME.fullmatch(text)}


def test_every_number_that_the_trainer_logs_is_on_the_page() -> None:
    logged = {name: source.name for source in LOGGED_BY for name in keys_in(source)}
    assert {"reward/mean", "seconds/data", "idle/actor", "eval/accuracy", "sync/seconds"} <= logged.keys()
    assert {name: source for name, source in logged.items() if name not in documented()} == {}


def test_every_number_on_the_page_is_logged() -> None:
    sources = [source for source in (ROOT / "pipeline").rglob("*.py") if source.name != "metric_names.py"]  # a list
    code = "".join(source.read_text() for source in sources)
    named = {name for name in documented() if not name.startswith("critic/")}
    derived = {name for name in named if name.endswith(("_max", "_min")) and name not in code}
    assert len(named) > 40
    assert {name for name in named - derived if f'"{name}"' not in code} == set()
    assert derived == {"ratio_max", "ratio_min", "log_ratio_max", "mismatch_max"}


@pytest.mark.parametrize("name", [*NAMES, "sft", "value"])
def test_every_metric_of_a_loss_is_on_the_page_of_metrics(name: str) -> None:
    if name == "value":
        found = means(numbers(total_value(value_tokens(), ValueLoss(0.2))[1]), N)
        assert {f"critic/{metric}" for metric in found} <= documented()
    else:
        found = measured([tokens()], SFT if name == "sft" else everything(name))
        assert len(found) > 2
        assert set(found) <= documented()


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_command_for_prometheus_writes_the_servers_of_the_newest_attempt_and_no_secret(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    jq .*?vllm_targets\.json$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for attempt, rank in (("12-0", 1), ("12-1", 2)):
        places = (
            Placement(role="trainer", index=0, rank=0, address="10.0.0.1", ports=(29500, 29501)),
            Placement(role="inference", index=0, rank=rank, address=f"10.0.0.{rank}", ports=(8000, 8001)),
        )
        world = World(run_id="r", attempt=attempt, epoch=1, leader=0, secret="never-written", placements=places)
        folder = RunPaths(tmp_path / "runs" / "demo").attempt("r", attempt).rendezvous
        folder.mkdir(parents=True)
        FileSharedDir(folder).create(WORLD, world)
        os.utime(folder / WORLD, (rank, rank))
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, timeout=60)
    text = (tmp_path / "vllm_targets.json").read_text()
    assert json.loads(text) == [{"targets": ["10.0.0.2:8000"], "labels": {"run": "r", "attempt": "12-1"}}]
    assert "never-written" not in text
