"""Names that one place of the packages owns: the commands and variables of a scheduler, and those of an engine.

Identifiers and strings count, docstrings and comments do not. Another scheduler or engine is then a folder, and no
search for conditions on the name of the first one.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("pipeline", "slurm", "launchers")


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
        "slurm/registry/attached_jobs.py": "the package slurm",
        "launchers/entry.py": "the package slurm",
    },
)

ENGINE = Owned(
    "(?i)vllm",
    "pipeline/inference/vllm/",
    {
        "pipeline/config/rollout_keys.py": "the default of the key inference.engine, and releases in a description",
        "pipeline/config/task_keys.py": "an example in a description",
        "pipeline/config/key_aliases.py": "the keys of other projects, which errors translate",
        "pipeline/inference/weight_sync/transports/nccl.py": "the binding of NCCL that vLLM ships",
        "launchers/install.py": "the packages of an installation",
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
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (module for module in modules if module.partition(".")[0] not in OURS)
            yield from (alias.asname or alias.name for alias in node.names if isinstance(node, ast.ImportFrom))


def files_with(owned: Owned) -> set[str]:
    """The files of the packages, outside the owner, that have one of its names."""
    pattern = re.compile(owned.pattern)
    others = {path: names for path, names in words_of_files().items() if not path.startswith(owned.owner)}
    return {path for path, names in others.items() if any(map(pattern.search, names))}


@cache
def words_of_files() -> dict[str, frozenset[str]]:
    files = [file for name in OURS for file in (ROOT / name).rglob("*.py")]
    return {str(file.relative_to(ROOT)): frozenset(words(ast.parse(file.read_text()))) for file in files}


@pytest.mark.parametrize("owned", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
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
