"""A user's modules as a run keeps them: which are copied, and that every later attempt imports the copy."""

import os
import shutil
from pathlib import Path

import pytest

import pipeline
from pipeline.environments.frozen_code import changed_modules, modules_named_in, modules_of
from pipeline.run.paths import RunPaths
from slurm.registry import run_registry
from slurm.submission.compose_config import compose_config
from slurm.submission.submission_warnings import warnings_of
from tests.fakes.configs import make_config
from tests.support.python import run_python

LATE = """
import words_of_mine.deep
def f(completions, **columns):
    from words_of_mine import late
    from words_of_mine.deep.far import FAR
    return [f"{late.SAYS} {words_of_mine.deep.HERE.read_text()} {FAR} {__file__}"]
"""
ASK = (
    "from pipeline.environments.user_imports import import_object; import pipeline; "
    "print(import_object('reward.functions', 'rewards_of_mine:f', '', '')(completions=[]), pipeline.__file__)"
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of rewards, and a package that it imports."""
    folder = tmp_path / "mine"
    package = folder / "words_of_mine"
    (package / "deep").mkdir(parents=True)
    (folder / "rewards_of_mine.py").write_text(LATE)
    (folder / "unrelated.py").write_text("")
    (package / "__init__.py").write_text("import json, numpy, no_such_module_at_all\n")
    (package / "late.py").write_text("SAYS = 'first'\n")
    (package / "deep" / "__init__.py").write_text(
        "from pathlib import Path\nfrom . import far\nHERE = Path(__file__).with_name('data')\n"
    )
    (package / "deep" / "far.py").write_text("from ..late import SAYS as FAR\n")
    (package / "deep" / "data").write_text("data")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_modules_are_those_named_and_what_they_import_from_their_folder(mine: Path) -> None:
    found = modules_of(["rewards_of_mine"])
    package = mine / "words_of_mine"
    assert found == {
        "rewards_of_mine": mine / "rewards_of_mine.py",
        "words_of_mine": package / "__init__.py",
        "words_of_mine.late": package / "late.py",
        "words_of_mine.deep": package / "deep" / "__init__.py",
        "words_of_mine.deep.far": package / "deep" / "far.py",
    }
    assert modules_of(["numpy.random", "json", "pipeline.environments.llm_judge", "no_such_module_at_all"]) == {}


def test_all_that_a_config_names_is_looked_at() -> None:
    other = {"task": {"name": "c:T"}, "reward": {"functions": ["d.e:f"]}}
    config = make_config(
        task={"name": "agent", "options": {"of": {"name": "a:T"}}},
        reward={"functions": ["task", "b:f"]},
        evaluation={"sets": {"other": other}},
    )
    assert sorted(modules_named_in(config)) == ["a", "b", "c", "d.e"]
    assert modules_named_in(make_config()) == []


def test_an_attempt_imports_what_the_run_was_made_with_whatever_was_edited_or_lost(mine: Path, tmp_path: Path) -> None:
    (mine / "words_of_mine" / "__init__.py").write_text("")
    config = compose_config(["experiment=demo", f"output={tmp_path / 'runs'}", "reward.functions=rewards_of_mine:f"])
    with run_registry.claimed_run(config) as run:
        (run.attempts / "a-0").mkdir(parents=True)
    first = f"['first data first {mine / 'rewards_of_mine.py'}'] {run.code / 'pipeline' / '__init__.py'}"
    assert attempt(run, mine) == first  # which also leaves bytecode of nothing beside the files
    assert changed_modules(run.code) == []
    (mine / "words_of_mine" / "late.py").write_text("SAYS = 'second'\n")
    (mine / "rewards_of_mine.py").unlink()
    with run_registry.claimed_run(config):  # a resumed run keeps its first copy
        pass
    assert attempt(run, mine) == first
    assert sorted(changed_modules(run.code)) == [mine / "rewards_of_mine.py", mine / "words_of_mine" / "late.py"]
    changed = [line for line in warnings_of(config) if "continues with its own copy" in line]
    assert len(changed) == 1
    assert "late.py" in changed[0]


def attempt(run: RunPaths, mine: Path) -> str:
    """What a process of an attempt imports and reads."""
    return run_python(f"{run.code}{os.pathsep}{mine}", "-c", ASK).strip()


def test_a_checkout_imports_what_is_there(mine: Path, tmp_path: Path) -> None:
    for package in ("pipeline", "slurm", "conf"):
        shutil.copytree(
            Path(pipeline.__file__).parents[1] / package,
            tmp_path / "code" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (mine / "words_of_mine" / "__init__.py").write_text("")
    (mine / "words_of_mine" / "late.py").write_text("SAYS = 'as it is'\n")

    class Checkout:
        code = tmp_path / "code"

    assert attempt(Checkout(), mine).startswith("['as it is data as it is")  # type: ignore[arg-type]
