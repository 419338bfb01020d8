"""Where a run's files are named."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run.paths import AttemptPaths, RunPaths, SweepPaths, rank_of_timeline

ROOT = Path(__file__).parents[3]
SPELLED = (".json", ".jsonl", ".html", ".lock")
SHARED = frozenset({"config.json"})
"""Names that other things than a run have, too: here, models."""


def names() -> set[str]:
    """The names of all files that `pipeline.run.paths` lists."""
    names = set()
    for paths in (RunPaths(Path()), SweepPaths(Path()), AttemptPaths(Path(), "r", "7-0")):
        properties = (name for name, value in vars(type(paths)).items() if isinstance(value, property))
        values = (getattr(paths, name) for name in properties)
        names |= {value.name for value in values if isinstance(value, Path) and value.name.endswith(SPELLED)}
    return names - SHARED


def spelled(tree: ast.AST) -> Iterator[str]:
    """The last part of every piece of text in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition("/")[2]


def test_no_module_but_one_spells_the_name_of_a_file_of_a_run() -> None:
    modules = [file for package in ("pipeline", "slurm", "launchers") for file in (ROOT / package).rglob("*.py")]
    owned = names()
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in modules
        if file != ROOT / "pipeline" / "run" / "paths.py"
        for name in spelled(ast.parse(file.read_text()))
        if name in owned
    ]
    assert found == []
    assert {"world.json", "run.json", "metrics.jsonl", "first_failure.json", "sweep.json", "job.lock"} <= owned


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank-12.jsonl", 12), ("rank-.jsonl", None), (".rank-1.jsonl", None), ("rank-1", None), ("1.jsonl", None)],
)
def test_a_timeline_is_known_by_its_name(name: str, rank: int | None) -> None:
    assert rank_of_timeline(name) == rank
    if rank is not None:
        assert AttemptPaths(Path(), "r", "7-0").timeline_of(rank).name == name
