"""docs/metrics.md against the code: every number that is logged is there, and no other."""

import ast
import re
from pathlib import Path

import pytest

from pipeline.train.algorithms import SFT, ValueLoss, total_value
from pipeline.train.algorithms.loss_metrics import means
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
    code = "".join(source.read_text() for source in (ROOT / "pipeline").rglob("*.py"))
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
