"""How to install an optional part."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from pipeline.utils.optional_extras import pip_install

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("extra", "package"), [("math", "math-verify"), ("s3", "s3fs"), ("tinker", "tinker")])
def test_the_packages_of_an_extra_are_named_themselves(extra: str, package: str) -> None:
    assert re.search(rf"-m pip install '?{package}[<>=]", pip_install(extra))


def test_every_package_of_an_extra_is_named() -> None:
    command = pip_install("optuna")
    assert all(package in command for package in ("hydra-optuna-sweeper", "sqlalchemy", "alembic"))


def test_an_extra_that_does_not_exist_is_an_error_of_the_caller() -> None:
    with pytest.raises(KeyError, match="no extra 'gpu'"):
        pip_install("gpu")


def test_a_checkout_that_was_never_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("pipeline.utils.optional_extras.requires", missing)
    assert pip_install("math") == "pip install -e '.[math]' in the checkout"


def test_nothing_tells_a_user_to_install_the_project_by_its_name_on_the_index() -> None:
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    files += [file for room in ("pipeline", "slurm", "launchers") for file in (ROOT / room).rglob("*.py")]
    told = [str(file.relative_to(ROOT)) for file in files if re.search(r"install '?rollcall\b", file.read_text())]
    assert told == []
