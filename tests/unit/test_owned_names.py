"""Names that one place of the packages owns: the commands and variables of a scheduler.

Identifiers and strings count, docstrings and comments do not. Another scheduler is then a folder, and no search for
conditions on the name of the first one.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Owned:
    """A pattern of names, the place that owns them, and the files that may have them in addition, with the reason."""

    pattern: str
    owner: str
    others: dict[str, str]


SCHEDULER = Owned(
    r"sbatch|scontrol|squeue|sinfo|sacct|scancel|srun|^S(LURM|BATCH)_|^slurm$",
    "slurm/scheduler/",
    {
        "pipeline/config/cluster_keys.py": "the keys cluster.sbatch and cluster.srun_args",
        "pipeline/config/cross_checks.py": "the key cluster.sbatch",
        "slurm/submission/compose_config.py": "the key cluster.sbatch",
        "slurm/submission/declined_options.py": "the keys cluster.sbatch and cluster.srun_args",
        "pipeline/environments/frozen_code.py": "the package slurm",
        "slurm/registry/code_snapshot.py": "the package slurm",
        "launchers/entry.py": "the package slurm",
    },
)


def words(tree: ast.Module) -> Iterator[str]:
    """The identifiers and strings of a module, without docstrings and the paths of our own packages in imports."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(named := getattr(node, field, None), str) and not isinstance(node, ast.alias):
                yield named
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names if isinstance(node, ast.ImportFrom))


def files_with(owned: Owned) -> set[str]:
    """The files of the packages, outside the owner, that have one of its names."""
    pattern, files = re.compile(owned.pattern), set[str]()
    for file in (file for name in ("pipeline", "slurm", "launchers") for file in (ROOT / name).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if not path.startswith(owned.owner) and any(map(pattern.search, words(ast.parse(file.read_text())))):
            files.add(path)
    return files


@pytest.mark.parametrize("owned", [SCHEDULER], ids=["scheduler"])
def test_names_of_one_place_are_nowhere_else(owned: Owned) -> None:
    assert files_with(owned) == owned.others.keys()


def test_a_condition_on_a_name_and_a_variable_are_seen_and_prose_is_not() -> None:
    pattern = re.compile(SCHEDULER.pattern)
    for text in ('x = name == "slurm"', 'os.environ["SLURM_JOB_ID"]', 'run("sbatch", file)', "def run_srun(): ..."):
        assert any(map(pattern.search, words(ast.parse(text)))), text
    for text in (
        '"""Submits with sbatch."""',
        "from slurm.agent import agent",
        'x = 1\n"""srun."""',
        'say("a Slurm job")',
    ):
        assert not any(map(pattern.search, words(ast.parse(text)))), text
